// The user's settings and the API key. They are stored only in this browser.

import { local, session } from "./site_data.js";

const NAME = "charonia-preferences";
const KEY = "charonia-key";
const DRAFT = "charonia-draft-";
// The sampling parameters that the user can set. The gateway defines their meaning and their values.
export const PARAMETERS = [
  "max_completion_tokens",
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
  "seed",
  "reasoning_effort",
];
// Settings of requests: those of all chats, of one chat, or of a preset.
const REQUEST_SETTINGS = {
  system: "",
  sampling: {}, // only what differs from the server's defaults
  format: "", // of the answer: "" (text), "json_object", "json_schema" or "regex"
  schema: "", // JSON, as typed
  regex: "",
  tools: "", // JSON, as typed
};
const DEFAULTS = {
  language: "", // "": the browser's
  theme: "", // "": the system's
  model: "",
  ...REQUEST_SETTINGS,
  presets: {}, // request settings by name
  servers: [], // MCP servers: {url, token}
  sidebar: true,
};

function read() {
  try {
    return { ...DEFAULTS, ...JSON.parse(local.get(NAME) ?? "{}") };
  } catch {
    return { ...DEFAULTS }; // not JSON: another program wrote it
  }
}

export const preferences = read();

export function setPreference(name, value) {
  preferences[name] = value;
  local.set(NAME, JSON.stringify(preferences));
}

export const apiKey = () => session.get(KEY) ?? local.get(KEY);

/** Stores the key for this browser session, or until it is removed. An empty key removes it. */
export function setApiKey(key, remember) {
  session.remove(KEY);
  local.remove(KEY);
  if (key) (remember ? local : session).set(KEY, key);
}

export const isKeyRemembered = () => local.get(KEY) !== null;

/** Unsent text by conversation; "" is the new conversation. */
export const draft = (id) => local.get(DRAFT + id) ?? "";

export function setDraft(id, text) {
  if (text) local.set(DRAFT + id, text);
  else local.remove(DRAFT + id);
}

/** Removes the drafts of deleted conversations. */
export function forgetDrafts(kept) {
  for (const name of local.names()) {
    const id = name.startsWith(DRAFT) && name.slice(DRAFT.length);
    if (id && !kept.has(id)) local.remove(name);
  }
}

/** A copy of the request settings in `from`. */
export const requestSettings = (from) => Object.fromEntries(Object.keys(REQUEST_SETTINGS).map((name) => [name, from[name] ?? REQUEST_SETTINGS[name]]));

/** The functions that the user has defined, in the API's format. Throws an error for the user. */
export function parseTools(text) {
  if (!text.trim()) return [];
  const tools = JSON.parse(text);
  if (!Array.isArray(tools)) throw new Error('expected a list: [{"type": "function", "function": {…}}]');
  return tools;
}

/** The names of these functions; none if the text is invalid. */
export function namesOf(text) {
  try {
    return new Set(parseTools(text).map((tool) => tool.function?.name));
  } catch {
    return new Set();
  }
}
