// What the user has set, and the API key. All of it stays in this browser.

const NAME = "charonia-preferences";
const KEY = "charonia-key";
const DRAFT = "charonia-draft-";
const DEFAULTS = {
  language: "", // "": the browser's
  theme: "", // "": the system's
  model: "",
  system: "",
  sampling: {}, // only what differs from the server's defaults
  tools: "", // JSON, as typed
  sidebar: true,
};

/** Keeps a value; where the browser has no more room, or none for pages, it holds until the page is closed. */
function keep(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // what is on the screen is not lost
  }
}

function read() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(NAME) ?? "{}") };
  } catch {
    return { ...DEFAULTS };
  }
}

export const preferences = read();

export function setPreference(name, value) {
  preferences[name] = value;
  keep(NAME, JSON.stringify(preferences));
}

export const apiKey = () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY);

/** Keeps the key for this browser session, or until it is forgotten. An empty one is forgotten. */
export function setApiKey(key, remember) {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
  if (key) (remember ? localStorage : sessionStorage).setItem(KEY, key);
}

export const isKeyRemembered = () => localStorage.getItem(KEY) !== null;

/** What was typed and not yet sent, by conversation; "" is the new one. */
export const draft = (id) => localStorage.getItem(DRAFT + id) ?? "";

export function setDraft(id, text) {
  if (text) keep(DRAFT + id, text);
  else localStorage.removeItem(DRAFT + id);
}

/** Those of conversations that are no longer there. */
export function forgetDrafts(kept) {
  for (const name of Object.keys(localStorage)) {
    const id = name.startsWith(DRAFT) && name.slice(DRAFT.length);
    if (id && !kept.has(id)) localStorage.removeItem(name);
  }
}

/** The functions that the model may call, as the API takes them. Throws what the user reads. */
export function parseTools(text) {
  if (!text.trim()) return [];
  const tools = JSON.parse(text);
  if (!Array.isArray(tools)) throw new Error('expected a list: [{"type": "function", "function": {…}}]');
  return tools;
}
