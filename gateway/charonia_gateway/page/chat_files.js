// Files of chats: this page's, and what ChatGPT (conversations.json), Open WebUI and llama.cpp's page export.

import { newConversation, newId } from "./conversations.js";
import { requestSettings } from "./preferences.js";

const FORMAT = "charonia-chat-1";
const ROLES = ["user", "assistant", "tool"];

export const exported = (conversations) => JSON.stringify({ format: FORMAT, conversations }, null, 1);

const string = (value, name) => {
  if (typeof value !== "string") throw new Error(`${name}: expected a string`);
  return value;
};

const time = (value) => (Number.isFinite(value) ? value : Date.now());

const number = (value) => (Number.isFinite(value) ? value : null);

function importedMessage(raw) {
  const message = {
    id: string(raw.id, "id"),
    parent: raw.parent === null ? null : string(raw.parent, "parent"),
    created: time(raw.created),
    role: string(raw.role, "role"),
    content: string(raw.content, "content"),
  };
  if (!ROLES.includes(message.role)) throw new Error(`role: expected one of ${ROLES.join(", ")}`);
  for (const name of ["reasoning", "finish", "error", "toolCallId", "model"]) {
    if (raw[name] !== undefined && raw[name] !== null) message[name] = string(raw[name], name);
  }
  if (Array.isArray(raw.files)) {
    message.files = raw.files.map((file) => ({ name: string(file.name, "name"), text: string(file.text, "text") }));
  }
  if (Array.isArray(raw.toolCalls)) {
    message.toolCalls = raw.toolCalls.map((call) => ({
      id: string(call.id, "id"),
      name: string(call.name, "name"),
      arguments: string(call.arguments, "arguments"),
    }));
  }
  if (raw.stats && typeof raw.stats === "object") {
    message.stats = Object.fromEntries(
      ["firstTokenS", "tokensPerS", "promptTokens", "completionTokens"].map((name) => [name, number(raw.stats[name])]),
    );
  }
  return message;
}

function importedSettings(raw) {
  const { sampling, ...texts } = requestSettings(raw);
  for (const [name, value] of Object.entries(texts)) string(value, name);
  const values = Object.entries(sampling).filter(([, value]) => ["number", "string"].includes(typeof value));
  return { ...texts, sampling: Object.fromEntries(values) };
}

function importedConversation(raw) {
  const conversation = {
    ...newConversation(),
    id: /^[\w-]{1,100}$/.test(raw.id ?? "") ? raw.id : newId(),
    title: string(raw.title, "title"),
    created: time(raw.created),
    updated: time(raw.updated),
  };
  if (raw.settings) conversation.settings = importedSettings(raw.settings);
  const messages = new Map(Object.values(raw.messages ?? {}).map((one) => [one.id, importedMessage(one)]));
  const rooted = new Set([null]); // messages whose path to the first message is verified
  for (const message of messages.values()) {
    const visited = new Set();
    for (let id = message.id; !rooted.has(id); id = messages.get(id).parent) {
      if (!messages.has(id) || visited.has(id)) throw new Error(`parent: ${id} is not a message before ${message.id}`);
      visited.add(id);
    }
    visited.forEach((id) => rooted.add(id));
  }
  conversation.messages = Object.fromEntries(messages);
  if (raw.leaf !== null && !messages.has(raw.leaf)) throw new Error(`leaf: there is no message ${raw.leaf}`);
  conversation.leaf = raw.leaf;
  return conversation;
}

// --- Other pages' files

/** A chat of this page's format. `nodes` also has what this page has no messages for, such as system prompts: their
 * replies move up. */
function chat(source, { id, title, created, updated, leaf, nodes }) {
  const all = new Map(nodes.map((node) => [String(node.id), node]));
  const isMessage = ({ role, content, files }) => ["user", "assistant"].includes(role) && (content || files?.length);
  const above = (from) => {
    const visited = new Set();
    let id = String(from);
    while (all.has(id) && !isMessage(all.get(id)) && !visited.has(id)) {
      visited.add(id);
      id = String(all.get(id).parent);
    }
    return all.has(id) && isMessage(all.get(id)) ? id : null;
  };
  const messages = nodes.filter(isMessage).map((node) => ({ ...node, id: String(node.id), parent: above(node.parent) }));
  return { id: id && `${source}-${id}`, title: title || "", created, updated, leaf: above(leaf) ?? messages.at(-1)?.id ?? null, messages };
}

const ofChatGpt = ({ title, create_time, update_time, mapping, current_node, conversation_id, id }) =>
  chat("chatgpt", {
    id: conversation_id ?? id,
    title,
    created: create_time * 1000,
    updated: update_time * 1000,
    leaf: current_node,
    nodes: Object.values(mapping).map(({ id, parent, message }) => ({
      id,
      parent,
      role: message?.author?.role,
      content: ["text", "multimodal_text"].includes(message?.content?.content_type)
        ? message.content.parts.filter((part) => typeof part === "string").join("\n\n")
        : "",
      created: message?.create_time * 1000,
      model: message?.metadata?.model_slug,
    })),
  });

const ofOpenWebUi = ({ id, title, chat: { history }, created_at, updated_at }) =>
  chat("openwebui", {
    id,
    title,
    created: created_at * 1000,
    updated: updated_at * 1000,
    leaf: history.currentId,
    nodes: Object.values(history.messages).map(({ id, parentId, role, content, timestamp, model }) => ({
      id,
      parent: parentId,
      role,
      content: content.replace(/<details type="(reasoning|tool_calls)"[^]*?<\/details>\s*/g, ""),
      created: timestamp * 1000,
      model,
    })),
  });

const ofLlamaCpp = ({ conv, messages }) =>
  chat("llamacpp", {
    id: conv.id,
    title: conv.name,
    created: messages[0]?.timestamp,
    updated: conv.lastModified,
    leaf: conv.currNode,
    nodes: messages.map(({ id, parent, role, content, timestamp, model, extra, reasoningContent, thinking }) => ({
      id,
      parent,
      role,
      content,
      created: timestamp,
      model,
      reasoning: reasoningContent || thinking,
      files: (extra ?? []).filter((file) => /^(text|pdf)/i.test(file.type)).map(({ name, content }) => ({ name, text: content })),
    })),
  });

function inOurFormat(one) {
  if (one?.mapping) return ofChatGpt(one);
  if (one?.chat?.history) return ofOpenWebUi(one);
  if (one?.conv && one.messages) return ofLlamaCpp(one);
  throw new Error("expected a file that this page, ChatGPT, Open WebUI or llama.cpp's page has exported");
}

/** The conversations of a file. Throws an error that describes an invalid file. */
export function imported(text) {
  const file = JSON.parse(text);
  const all = file?.format === FORMAT && Array.isArray(file.conversations) ? file.conversations : [file].flat().map(inOurFormat);
  return all.map(importedConversation);
}
