// Files of chats: this page's, and what ChatGPT, Open WebUI and llama.cpp's page export (JSON, JSON lines, ZIP).

import { text } from "./languages.js";
import { newConversation, newId } from "./conversations.js";
import { PARAMETERS, requestSettings } from "./preferences.js";

const FORMAT = "charonia-chat-1";
const ROLES = ["user", "assistant", "tool"];
const MAX_TITLE = 200; // characters
const MAX_UNZIPPED_BYTES = 1e9;

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

/** dropped: gets the names of unknown and invalid sampling parameters. */
function importedSettings(raw, dropped) {
  const { sampling, ...texts } = requestSettings(raw);
  for (const [name, value] of Object.entries(texts)) string(value, name);
  const isValid = ([name, value]) => PARAMETERS.includes(name) && ["number", "string"].includes(typeof value);
  const values = Object.entries(sampling).filter((entry) => isValid(entry) || !dropped.add(entry[0]));
  return { ...texts, sampling: Object.fromEntries(values) };
}

function importedConversation(raw, dropped) {
  const conversation = {
    ...newConversation(),
    id: /^[\w-]{1,100}$/.test(raw.id ?? "") ? raw.id : newId(),
    title: string(raw.title, "title").slice(0, MAX_TITLE),
    created: time(raw.created),
    updated: Math.min(time(raw.updated), Date.now()),
  };
  if (raw.toolsOff) conversation.toolsOff = true;
  if (raw.settings) conversation.settings = importedSettings(raw.settings, dropped);
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
  const isMessage = ({ role, content, files, toolCalls }) => ROLES.includes(role) && (content || files?.length || toolCalls?.length);
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
  const known = id || messages[0]?.id; // so that a second import finds the chat
  return { id: `${source}-${known}`, title: string(title || "", "title"), created, updated, leaf: above(leaf) ?? messages.at(-1)?.id ?? null, messages };
}

const textOrNothing = (value) => (typeof value === "string" ? value : "");

/** The text of a message of ChatGPT, without its marks of citations. */
function chatGptText({ content } = {}) {
  if (!["text", "multimodal_text"].includes(content?.content_type)) return "";
  const parts = (content.parts ?? []).filter((part) => typeof part === "string");
  return parts.join("\n\n").replace(/\ue200[^\ue201]*\ue201/g, "");
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
      role: message?.author?.role === "tool" ? null : message?.author?.role,
      content: chatGptText(message ?? {}),
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
      content: textOrNothing(content).replace(/<details type="(reasoning|tool_calls)"[^]*?<\/details>\s*/g, ""),
      created: timestamp * 1000,
      model,
    })),
  });

/** The calls in a file of llama.cpp's page: a list, or its JSON. */
function llamaCppCalls(calls) {
  const all = typeof calls === "string" && calls ? JSON.parse(calls) : calls;
  return all && all.map(({ id, function: { name, arguments: given } }) => ({ id, name, arguments: given ?? "" }));
}

const ofLlamaCpp = ({ conv, messages }) =>
  chat("llamacpp", {
    id: conv.id,
    title: conv.name,
    created: messages[0]?.timestamp,
    updated: conv.lastModified,
    leaf: conv.currNode,
    nodes: messages.map(({ id, parent, role, content, timestamp, model, extra, reasoningContent, thinking, toolCalls, toolCallId }) => ({
      id,
      parent,
      role,
      content: textOrNothing(content),
      toolCalls: llamaCppCalls(toolCalls),
      toolCallId,
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

/** The values in a text: of JSON, or of JSON lines. */
function values(source) {
  try {
    return [JSON.parse(source)].flat();
  } catch (error) {
    try {
      return source.split("\n").filter((line) => line.trim()).map((line) => JSON.parse(line));
    } catch {
      throw error;
    }
  }
}

/** Joins the lines of llama.cpp's page: one for a chat, followed by one for each of its messages. */
function joined(all) {
  const chats = [];
  for (const one of all) {
    if (one?.type === "session") chats.push({ conv: one, messages: [] });
    else if (one?.type === "message" && chats.at(-1)?.conv) chats.at(-1).messages.push(one.message);
    else chats.push(one);
  }
  return chats;
}

/** The texts of the files with chats in a ZIP file. */
async function unzipped(file) {
  const { strFromU8, unzipSync } = await import("./libraries/fflate/esm/browser.js");
  let bytes = 0;
  const isWanted = ({ name, originalSize }) => {
    if (!/(^|\/)conversations[^/]*\.json$|\.jsonl$/.test(name)) return false;
    bytes += originalSize;
    if (bytes > MAX_UNZIPPED_BYTES) throw new Error(text("tooLarge", file.name, `${MAX_UNZIPPED_BYTES / 1e6} MB`));
    return true;
  };
  const files = unzipSync(new Uint8Array(await file.arrayBuffer()), { filter: isWanted });
  return Object.values(files).map((one) => strFromU8(one));
}

const readers = (file) =>
  file?.format === FORMAT && Array.isArray(file.conversations) ? file.conversations.map((one) => () => one) : [() => inOurFormat(file)];

/** The conversations of a file, the errors of its invalid ones, and the names of settings that were left out: {found,
 * errors, dropped}. Throws an error if no conversation is valid. */
export async function imported(file) {
  const isZip = (await file.slice(0, 4).text()) === "PK\x03\x04";
  const texts = isZip ? await unzipped(file) : [await file.text()];
  const found = [];
  const errors = [];
  const dropped = new Set();
  for (const read of joined(texts.flatMap(values)).flatMap(readers)) {
    try {
      found.push(importedConversation(read(), dropped));
    } catch (error) {
      errors.push(error);
    }
  }
  if (!found.length) throw errors[0] ?? new Error(text("noChatsInFile"));
  return { found, errors, dropped: [...dropped] };
}
