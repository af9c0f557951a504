// Conversations: trees of messages, kept in this browser's IndexedDB.
//
// conversation  {id, title, created, updated, leaf, messages: {id: message}}, and if they differ from other chats' the
//               settings (preferences.js), toolsOff, and the tools that may run without a question (allowed)
// message       {id, parent, role, content, created}, and as its role needs files (of the user), or reasoning, toolCalls,
//               finish, error, stats (of the assistant), or toolCallId (of a tool)
// An edited message and a regenerated response are siblings of the old one. `leaf` is the end of the shown branch.
// A deleted conversation leaves {id, removed}, so that another tab that still has it does not restore it.

import { openDB } from "./libraries/idb/build/index.js";
import { openChannel } from "./site_data.js";

const STORE = "conversations";
const REMEMBERED_MS = 30 * 24 * 3600 * 1000; // how long a deletion is remembered
// Fields that a user changes, by the field with the time of the change. The latest change of all tabs holds.
const CHANGED = [["renamed", ["title"]], ["adjusted", ["settings", "toolsOff", "allowed"]]];
const CLAIM_MS = 2000; // time for a tab to report its running responses; a tab that draws a huge response is slow

let database;
const below = new WeakMap(); // conversation to its messages by parent
const channel = openChannel("charonia-conversations");
const writers = openChannel("charonia-writers");
let ownMessages = () => []; // the ids of the messages that this tab is writing

/** Opens the database. onChange(id) is called when another tab has changed or deleted a conversation. */
export async function open(onChange) {
  database = await openDB("charonia", 1, { upgrade: (made) => made.createObjectStore(STORE, { keyPath: "id" }) });
  channel.onmessage = (event) => onChange(event.data);
  const all = await database.getAll(STORE);
  const old = all.filter(({ removed }) => removed < Date.now() - REMEMBERED_MS);
  await Promise.all(old.map(({ id }) => database.delete(STORE, id)));
  return all.filter(({ removed }) => !removed).sort((a, b) => b.updated - a.updated);
}

/** The stored conversation; undefined if it was deleted. */
export async function load(id) {
  const found = await database.get(STORE, id);
  return found?.removed ? undefined : found;
}

const size = ({ content, reasoning, toolCalls }) =>
  content.length + (reasoning ?? "").length + (toolCalls ? JSON.stringify(toolCalls).length : 0);

/** The later of two states of one message: messages only grow, and end. */
function later(mine, stored) {
  if (size(mine) !== size(stored)) return size(mine) > size(stored) ? mine : stored;
  return mine.state && !stored.state ? stored : mine;
}

/** Stores a conversation, merged with changes of other tabs. `conversation` gets these changes, too. Returns false if
 * it was deleted; undo = true restores it. */
export async function save(conversation, undo = false) {
  const transaction = database.transaction(STORE, "readwrite");
  const kept = await transaction.store.get(conversation.id);
  if (kept?.removed && !undo) return false;
  for (const [changed, names] of CHANGED) {
    if (!((kept?.[changed] ?? 0) > (conversation[changed] ?? 0))) continue;
    for (const name of [changed, ...names]) conversation[name] = kept[name]; // another tab changed it, while this one wrote
  }
  const stored = kept?.messages ?? {};
  const own = new Set(ownMessages()); // a tab that takes this one for closed breaks them off
  let grown = false;
  for (const [id, message] of Object.entries(stored)) {
    const mine = conversation.messages[id];
    if (!mine) {
      conversation.messages[id] = message;
      grown = true;
    } else if (!(own.has(id) && message.finish === "broken") && later(mine, message) === message) {
      delete mine.state;
      Object.assign(mine, message);
    }
  }
  if (grown) {
    below.delete(conversation);
    if (conversation.leaf !== null) show(conversation, conversation.messages[conversation.leaf]);
  }
  await transaction.store.put(conversation);
  await transaction.done;
  channel.postMessage(conversation.id);
  return true;
}

export async function remove(id) {
  await database.put(STORE, { id, removed: Date.now() });
  channel.postMessage(id);
}

/** Answers other tabs' requests: for the ids of the messages that this tab is writing, and to stop the response in a
 * conversation. */
export function answerTabs({ written, stop }) {
  ownMessages = written;
  writers.onmessage = ({ data }) => {
    const mine = written();
    if (data.ask && mine.length) writers.postMessage({ writes: mine });
    if (data.stop) stop(data.stop);
  };
}

/** Stops the response that another tab is writing in a conversation. */
export const stopElsewhere = (id) => writers.postMessage({ stop: id });

/** The ids of the messages that other tabs are writing. */
export async function writtenElsewhere() {
  const asking = openChannel("charonia-writers");
  const found = new Set();
  asking.onmessage = ({ data }) => data.writes?.forEach((id) => found.add(id));
  asking.postMessage({ ask: true });
  await new Promise((resolve) => setTimeout(resolve, CLAIM_MS));
  asking.close();
  return found;
}

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export function newConversation() {
  return { id: newId(), title: "", created: Date.now(), updated: Date.now(), leaf: null, messages: {} };
}

/** Adds a message under `parent` and shows it. */
export function add(conversation, parent, fields) {
  const message = { id: newId(), parent, created: Date.now(), content: "", ...fields };
  conversation.messages[message.id] = message;
  below.delete(conversation);
  conversation.leaf = message.id;
  conversation.updated = Date.now();
  return message;
}

/** Adds the messages of another copy of a conversation. Returns whether there are any. */
export function adopt(conversation, copy) {
  const added = Object.keys(copy.messages).filter((id) => !(id in conversation.messages));
  for (const id of added) conversation.messages[id] = copy.messages[id];
  below.delete(conversation);
  return added.length > 0;
}

/** The messages from the first to `leaf`, in order. */
export function path(conversation, leaf = conversation.leaf) {
  const found = [];
  for (let id = leaf; id !== null; id = conversation.messages[id].parent) found.push(conversation.messages[id]);
  return found.reverse();
}

/** The replies to `parent`, oldest first. */
function children(conversation, parent) {
  if (!below.has(conversation)) {
    const byParent = new Map();
    for (const message of Object.values(conversation.messages)) {
      if (!byParent.has(message.parent)) byParent.set(message.parent, []);
      byParent.get(message.parent).push(message);
    }
    for (const messages of byParent.values()) messages.sort((a, b) => a.created - b.created);
    below.set(conversation, byParent);
  }
  return below.get(conversation).get(parent) ?? [];
}

/** The versions of a message, including itself. */
export const siblings = (conversation, message) => children(conversation, message.parent);

/** Shows the message's branch, up to its newest end. */
export function show(conversation, message) {
  let id = message.id;
  for (let next = children(conversation, id); next.length; next = children(conversation, id)) id = next.at(-1).id;
  conversation.leaf = id;
}

/** Whether a conversation has all the words of the query, in its title or its messages. */
export function matches(conversation, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return true;
  const texts = [conversation.title, ...Object.values(conversation.messages).map((message) => message.content)];
  const text = texts.join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}
