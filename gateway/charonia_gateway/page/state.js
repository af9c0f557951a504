// What the page shows, and what its buttons do.

import { models, whyNotThisPage } from "./api.js";
import { write } from "./answering.js";
import * as store from "./conversations.js";
import { text } from "./languages.js";
import { finish } from "./markdown.js";
import { apiKey, draft, forgetDrafts, preferences, setApiKey, setDraft, setPreference } from "./preferences.js";
import { CROWDED_MS, tell, watch } from "./server_watch.js";

const MAX_FILE_BYTES = 1_000_000;
const SAVE_MS = 1000;
const SETTLE_MS = 10_000; // between two looks at answers that other tabs write

export const state = {
  conversations: [], // the newest first
  current: null, // a conversation; one that nothing was said in is not among them
  query: "",
  files: [], // of the composer: {name, text}
  editing: null, // id of the message that is edited
  models: [],
  model: "",
  contextLength: new Map(), // by model
  running: new Map(), // conversation id to AbortController
  problem: null, // why the server does not answer: an Error
  refused: null, // why it answers nothing that this page asks: an Error
  notice: null, // {text, action: {label, run}}
  spoken: "", // for screen readers
  sidebarOpen: false, // on narrow screens
  keyDialog: null, // {reason, done}
  drawing: false, // an element that loses the focus does so because it is moved
  settingsOpen: false,
  stored: true,
};

let redraw = () => {};
let scheduled = false;
let costMs = 0; // of the last drawing

/** Draws with the next frame, or soon where the page is not seen. Drawings that are slow (a huge answer) leave half of the
 * time to the user. */
export function update() {
  if (scheduled) return;
  scheduled = true;
  const draw = () => {
    if (!scheduled) return;
    scheduled = false;
    const began = performance.now();
    redraw();
    costMs = performance.now() - began;
  };
  if (costMs < 50) requestAnimationFrame(draw);
  setTimeout(draw, Math.max(200, costMs));
}

// --- Storage

const unsaved = new Map(); // conversation to timer

async function saveNow(conversation, undo = false) {
  clearTimeout(unsaved.get(conversation));
  unsaved.delete(conversation);
  try {
    if (!(await store.save(conversation, undo))) forget(conversation);
    settle();
    update(); // another tab may have added to it
  } catch {
    state.stored = false;
    update();
  }
}

function saveSoon(conversation) {
  if (!unsaved.has(conversation)) unsaved.set(conversation, setTimeout(() => saveNow(conversation), SAVE_MS));
}

/** Lets go of a conversation that another tab has deleted. What is typed and not sent stays in the composer. */
function forget(conversation) {
  dismiss(conversation);
  const typed = draft(conversation.id);
  setDraft(conversation.id, "");
  if (state.current.id === conversation.id) {
    if (typed && !draft("")) setDraft("", typed);
    newChat();
    notify(text("removedElsewhere"));
  }
  update();
}

async function changedElsewhere(id) {
  const loaded = await store.load(id);
  if (!loaded) {
    const known = [...state.conversations, state.current].find((one) => one.id === id);
    if (known) forget(known);
    return;
  }
  if (state.running.has(id)) return;
  keep(loaded);
  if (state.current.id === id) {
    const leaf = state.editing !== null && loaded.messages[state.current.leaf];
    if (leaf) store.show(loaded, leaf); // whatever the other tab shows: what is edited stays in sight
    state.current = loaded;
  }
  settle();
  update();
}

const writing = new Map(); // messages that this tab writes, to their conversations

function breakOff(message) {
  for (const name of ["state", "waitS", "waitsFor"]) delete message[name];
  message.finish = "broken";
}

/** The answers that other tabs write, or wrote when they were closed, with their conversations. */
const begunElsewhere = () =>
  state.conversations.flatMap((conversation) =>
    Object.values(conversation.messages)
      .filter((message) => message.state && !writing.has(message))
      .map((message) => [message, conversation]),
  );

let settling = false;

/** Ends the answers that no tab writes any more. A tab that nobody sees leaves that to others, or to when it is seen. */
async function settle() {
  if (settling || document.hidden) return;
  const asked = new Set(begunElsewhere().map(([{ id }]) => id));
  if (!asked.size) return;
  settling = true;
  const written = await store.writtenElsewhere();
  for (const [message, conversation] of begunElsewhere()) {
    if (!asked.has(message.id) || written.has(message.id)) continue;
    breakOff(message);
    saveNow(conversation);
  }
  update();
  setTimeout(() => ((settling = false), settle()), SETTLE_MS);
}

// --- Server

let outdated = true; // the server may have other models than when it was asked for them

/** What this tab or another has found: the server is away, or it takes requests again (null). */
function serverChanged(problem) {
  const isBack = state.problem && !problem;
  state.problem = problem;
  if (isBack) {
    outdated = true;
    finish();
    notify(text("serverBack"));
    if (!document.hidden) loadModels();
  }
  update();
}

/** The name of the model that is asked. again: the server may have another one than it had. */
async function currentModel(again = false) {
  if (!outdated && !again && state.contextLength.get(state.model)) return state.model;
  state.contextLength = await models();
  state.models = [...state.contextLength.keys()];
  outdated = false;
  const before = state.model;
  if (!state.models.includes(before)) {
    state.model = state.models.includes(preferences.model) ? preferences.model : state.models[0];
    if (before) notify(text("modelChanged", state.model));
  }
  update();
  checkOrigin();
  return state.model;
}

export async function loadModels() {
  try {
    await currentModel();
  } catch (error) {
    if (error.kind === "key") {
      if (await askKey(error)) await loadModels();
    } else tell(error);
  }
}

/** Says before the first message that the server does not take it. A gateway with keys knows its page under any name, and the
 * question would cost the key a request. */
async function checkOrigin() {
  state.refused = apiKey() ? null : await whyNotThisPage(state.model);
  update();
}

export function chooseModel(model) {
  state.model = model;
  setPreference("model", model);
  update();
}

/** Resolves to whether there is another key than the one that a request failed with. Several requests ask once. */
export async function askKey({ key, message }) {
  if (key !== apiKey()) return true;
  if (!state.keyDialog) {
    let done;
    const answer = new Promise((resolve) => (done = resolve));
    state.keyDialog = { reason: message, done, answer };
    update();
  }
  return state.keyDialog.answer;
}

export function closeKeyDialog(key, remember) {
  const dialog = state.keyDialog;
  if (!dialog) return;
  state.keyDialog = null;
  if (key) {
    setApiKey(key, remember);
    if (outdated) loadModels();
  }
  dialog.done(Boolean(key));
  update();
}

// --- Notices

let noticeTimer;

export function notify(words, action = null) {
  state.notice = { text: words, action };
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(() => ((state.notice = null), update()), action ? 8000 : 4000);
  update();
}

// --- Conversations

export function newChat() {
  state.current = store.newConversation();
  state.editing = null;
  state.files = [];
  state.sidebarOpen = false;
  update();
}

/** Has them in the list, in place of what has their ids: another tab's changes come as another object. */
function keep(...conversations) {
  const ids = new Set(conversations.map(({ id }) => id));
  state.conversations = [...conversations, ...state.conversations.filter(({ id }) => !ids.has(id))];
  state.conversations.sort((a, b) => b.updated - a.updated);
}

/** A conversation that was drawn, as it is now: another tab may have changed it since. */
const latest = (drawn) => state.conversations.find(({ id }) => id === drawn.id) ?? drawn;

export function openChat(drawn) {
  state.current = latest(drawn);
  state.editing = null;
  state.files = [];
  state.sidebarOpen = false;
  update();
}

export function renameChat(drawn, title) {
  const conversation = latest(drawn);
  if (!title.trim() || [drawn.title, conversation.title].includes(title)) return;
  conversation.title = title.trim().slice(0, 200);
  conversation.renamed = Date.now();
  saveNow(conversation);
  update();
}

/** Takes a conversation off this tab. */
function dismiss(conversation) {
  state.running.get(conversation.id)?.abort();
  state.conversations = state.conversations.filter((one) => one.id !== conversation.id);
  clearTimeout(unsaved.get(conversation));
  unsaved.delete(conversation);
}

export function removeChat(drawn) {
  const conversation = latest(drawn);
  dismiss(conversation);
  const removed = store.remove(conversation.id).catch(() => {});
  if (state.current.id === conversation.id) newChat();
  const undo = async () => {
    await removed;
    restore([latest(conversation)]);
  };
  notify(text("removed"), { label: text("undo"), run: undo });
}

function restore(conversations) {
  keep(...conversations);
  conversations.forEach((one) => saveNow(one, true));
  state.notice = null;
  update();
}

export function exportChats() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([store.exported(state.conversations)], { type: "application/json" }));
  link.download = `charonia-chats-${new Date().toISOString().slice(0, 10)}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

export async function importChats(file) {
  try {
    const conversations = store.imported(await file.text());
    restore(conversations);
    notify(text("imported", conversations.length));
  } catch (error) {
    notify(text("importFailed", error.message));
  }
}

export const foundChats = () => state.conversations.filter((one) => store.matches(one, state.query));

// --- Messages

const isRunning = (conversation = state.current) => state.running.has(conversation.id);

/** What is typed in the composer belongs to its conversation; that of all new ones is one. */
const draftName = () => (state.current.leaf === null ? "" : state.current.id);
export const currentDraft = () => draft(draftName());
export const keepDraft = (typed) => setDraft(draftName(), typed);

const WAITING = {
  busy: "waitingBusy",
  limit: "waitingLimit",
  away: "waitingAway",
  lost: "waitingLost",
};

/** Why an answer has not begun, in words; "" where nothing is in its way. */
export function whyItWaits({ state: why, model, waitS }) {
  if (why === "unloaded") return text("waitingModel", model, waitS);
  return why in WAITING ? text(WAITING[why], waitS) : "";
}

async function answer(conversation, message, begun = false) {
  const controller = new AbortController();
  state.running.set(conversation.id, controller);
  writing.set(message, conversation);
  const waits = setInterval(update, CROWDED_MS + 100); // it may find by then that it waits for a connection
  state.spoken = text("answering");
  let spokenOf = message.state;
  const changed = () => {
    if (message.state !== spokenOf && message.state !== "waiting") {
      spokenOf = message.state; // and the seconds of a wait are not read out one by one
      state.spoken = whyItWaits(message) || text("answering");
    }
    saveSoon(conversation);
    update();
  };
  try {
    await write(conversation, message, {
      model: currentModel,
      begun,
      signal: controller.signal,
      changed,
      askKey,
    });
  } catch (error) {
    // Nothing that the page sends: its own settings are wrong.
    Object.assign(message, { finish: "failed", error: error.message });
    delete message.state;
  }
  clearInterval(waits);
  state.running.delete(conversation.id);
  writing.delete(message);
  state.spoken = message.error ?? text("answered");
  if (state.conversations.includes(conversation)) saveNow(conversation);
  update();
}

const answerUnder = (conversation, parent) =>
  answer(conversation, store.add(conversation, parent, { role: "assistant" }));

/** Sends what is in the composer. */
export function send(typed) {
  const conversation = state.current;
  if ((!typed.trim() && !state.files.length) || isRunning()) return false;
  keepDraft("");
  const message = store.add(conversation, conversation.leaf, { role: "user", content: typed.trim(), files: state.files });
  conversation.title ||= (typed.trim() || state.files[0].name).split("\n")[0].slice(0, 80);
  state.files = [];
  keep(conversation);
  saveNow(conversation);
  answerUnder(conversation, message.id);
  return true;
}

export const stop = () => state.running.get(state.current.id)?.abort();

/** Whether a message that was drawn is there still: another tab may have deleted the chat since. */
const isHere = ({ id }) => id in state.current.messages;

/** Makes the answer once more, beside the one that is there. */
export function regenerate(message) {
  if (!isRunning() && isHere(message)) answerUnder(state.current, message.parent);
}

export function goOn(drawn) {
  const message = state.current.messages[drawn.id]; // as it is now: another tab may have changed it, or gone on itself
  if (message && canGoOn(message) && !isRunning()) answer(state.current, message, true);
}

export const canGoOn = (message) =>
  Boolean(message.content) &&
  !message.reasoning &&
  !message.toolCalls?.length &&
  ["length", "stopped", "broken", "failed"].includes(message.finish);

export function edit(id) {
  state.editing = id;
  update();
}

/** Sends an edited message as a new branch. */
export function sendEdited(message, content) {
  state.editing = null;
  update();
  if (!content.trim() || content === message.content || isRunning() || !isHere(message)) return;
  const { role, files, parent } = message;
  const made = store.add(state.current, parent, { role, content: content.trim(), files });
  keep(state.current);
  answerUnder(state.current, made.id);
}

/** Gives the results of an answer's calls back to the model. */
export function sendResults(message, results) {
  if (isRunning() || !isHere(message)) return;
  let parent = message.id;
  message.toolCalls.forEach((call, index) => {
    parent = store.add(state.current, parent, { role: "tool", content: results[index], toolCallId: call.id }).id;
  });
  answerUnder(state.current, parent);
}

export function showVersion(message) {
  if (!isHere(message)) return;
  store.show(state.current, message);
  saveNow(state.current);
  update();
}

export async function attach(files) {
  for (const file of files) {
    if (file.size > MAX_FILE_BYTES) {
      notify(text("tooLarge", file.name, `${MAX_FILE_BYTES / 1e6} MB`));
      continue;
    }
    try {
      const content = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (content.includes("\0")) throw new Error("binary");
      state.files = [...state.files, { name: file.name, text: content }];
    } catch {
      notify(text("notText", file.name));
    }
  }
  update();
}

/** Takes over what this browser keeps, and looks for the server. draw() draws the state. */
export async function start(draw) {
  redraw = draw;
  newChat();
  try {
    state.conversations = await store.open(changedElsewhere);
    forgetDrafts(new Set(state.conversations.map(({ id }) => id)));
  } catch {
    state.stored = false;
  }
  store.tellWhatIsWritten(() => Array.from(writing.keys(), ({ id }) => id));
  settle();
  window.addEventListener("pagehide", () => {
    for (const message of writing.keys()) breakOff(message);
    new Set([...writing.values(), ...unsaved.keys()]).forEach((conversation) => saveNow(conversation));
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    settle();
    if (outdated) loadModels();
    else if (state.refused) checkOrigin();
  });
  watch(serverChanged);
  update();
  await loadModels();
}

