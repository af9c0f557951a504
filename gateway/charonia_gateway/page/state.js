// The page's state, and the actions of its buttons.

import { ServerError, loadModel, models, whyNotThisPage } from "./api.js";
import { MOMENTARY, write } from "./answering.js";
import { exported, imported } from "./chat_files.js";
import * as store from "./conversations.js";
import { textOf } from "./files.js";
import { text } from "./languages.js";
import { finish } from "./markdown.js";
import * as mcp from "./mcp.js";
import { apiKey, draft, forgetDrafts, namesOf, preferences, requestSettings, setApiKey, setDraft, setPreference } from "./preferences.js";
import { CROWDED_MS, tell, watch } from "./server_watch.js";

const MAX_ROUNDS = 25; // of calls without a question, after each message of the user
const MAX_NAMES = 200; // characters
const SAVE_MS = 1000;
const SETTLE_MS = 10_000; // between two checks of responses that other tabs write

export const state = {
  conversations: [], // the newest first
  current: null, // a conversation; a new one without messages is not in the list
  query: "",
  files: [], // of the composer: {name, text}
  editing: null, // id of the message that is edited
  models: new Map(), // the server's descriptions by name
  model: "",
  running: new Map(), // conversation id to AbortController
  problem: null, // why the server is not available: an Error
  refused: null, // why the server rejects this page's requests: an Error
  notice: null, // {text, action: {label, run}}
  spoken: "", // for screen readers
  sidebarOpen: false, // on narrow screens
  keyDialog: null, // {reason, done}
  drawing: false, // while drawing, an element loses the focus only because it is moved
  settingsOpen: false,
  stored: true,
};

let redraw = () => {};
let scheduled = false;
let costMs = 0; // time of the last drawing

/** Draws in the next frame, or soon if the page is hidden. Slow drawings (a huge response) leave half of the time to
 * the user. */
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
    update(); // another tab may have changed it
  } catch {
    state.stored = false;
    update();
  }
}

function saveSoon(conversation) {
  if (!unsaved.has(conversation)) unsaved.set(conversation, setTimeout(() => saveNow(conversation), SAVE_MS));
}

/** Drops a conversation that another tab has deleted. Unsent text stays in the composer. */
function forget(conversation) {
  dismiss(conversation);
  const typed = draft(conversation.id);
  setDraft(conversation.id, "");
  if (state.current.id === conversation.id) {
    if (typed && !draft("")) setDraft("", typed);
    leave();
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
  if (state.running.has(id)) {
    // A tab that does not answer in time is taken for closed. If that was this tab, it continues to write.
    const isBroken = ([{ id: message }, { id: written }]) => written === id && loaded.messages[message]?.finish === "broken";
    const [, conversation] = [...writing].find(isBroken) ?? [];
    if (conversation) saveNow(conversation);
    return;
  }
  keep(loaded);
  if (state.current.id === id) {
    const leaf = state.editing !== null && loaded.messages[state.current.leaf];
    if (leaf) store.show(loaded, leaf); // keep the edited message in view, even if the other tab shows another branch
    state.current = loaded;
  }
  settle();
  update();
}

const writing = new Map(); // conversation by message, for the messages that this tab is writing

function breakOff(message) {
  for (const name of MOMENTARY) delete message[name];
  message.finish = "broken";
}

/** The unfinished responses of other tabs, open or closed, with their conversations. */
const begunElsewhere = () =>
  state.conversations.flatMap((conversation) =>
    Object.values(conversation.messages)
      .filter((message) => message.state && !writing.has(message))
      .map((message) => [message, conversation]),
  );

let settling = false;

/** Ends the responses that no tab is writing any more. A hidden tab leaves that to other tabs, or waits until it is
 * visible. */
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

let outdated = true; // the list of models may be outdated

/** Takes a result of the server watch: the server is not available, or takes requests again (null). */
function serverChanged(problem) {
  const isBack = state.problem && !problem;
  state.problem = problem;
  if (isBack) {
    outdated = true;
    finish();
    if (!state.notice?.action) notify(text("serverBack"));
    if (!document.hidden) loadModels();
  }
  update();
}

/** The name of the model for a request. again: the server may have other models now. */
async function currentModel(again = false) {
  if (!outdated && !again && state.models.get(state.model)?.max_model_len) return state.model;
  state.models = await models();
  outdated = false;
  const before = state.model;
  if (!state.models.has(before)) {
    state.model = state.models.has(preferences.model) ? preferences.model : state.models.keys().next().value;
    if (before && state.model) notify(text("modelChanged", state.model));
  }
  update();
  checkRefusal();
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

/** Shows before the first message that the server will reject it. The origin is not checked for a gateway with keys: it
 * accepts its page under any name, and the check would count as a request of the key. */
async function checkRefusal() {
  if (!state.models.size) state.refused = new ServerError("task", text("noChatText"));
  else state.refused = apiKey() ? null : await whyNotThisPage(state.model);
  update();
}

/** Lets the server load a model. Resolves to an error for the user, or null. */
export async function addModel(model) {
  try {
    await loadModel(model);
    await currentModel(true);
    return null;
  } catch (error) {
    return error.message;
  }
}

export function chooseModel(model) {
  state.model = model;
  setPreference("model", model);
  update();
}

/** Resolves to whether there is another key than the failed request's. Several failed requests show one dialog. */
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

function show(conversation) {
  state.current = conversation;
  state.editing = null;
  state.files = [];
  state.sidebarOpen = false;
  update();
}

/** The address of a conversation within the page. A new conversation has none. */
export const address = ({ id }) => `#chat/${id}`;

/** Makes the browser's address the current conversation's. change: "pushState" adds a page to the browser's history,
 * "replaceState" does not. */
function setAddress(change) {
  const wanted = state.current.leaf === null ? "" : address(state.current);
  if (location.hash !== wanted) history[change](null, "", wanted || location.pathname + location.search);
}

/** Shows the conversation of the browser's address: of a link, a reload, or the history. */
function openAddress() {
  const found = state.conversations.find((one) => address(one) === location.hash);
  show(found ?? store.newConversation());
  if (location.hash && !found) notify(text("noSuchChat"));
  setAddress("replaceState");
}

export function newChat() {
  show(store.newConversation());
  setAddress("pushState");
}

/** Shows a new chat instead of a deleted one. */
function leave() {
  show(store.newConversation());
  setAddress("replaceState");
}

/** Puts conversations into the list and replaces objects with the same ids: a change of another tab is a new object. */
function keep(...conversations) {
  const ids = new Set(conversations.map(({ id }) => id));
  state.conversations = [...conversations, ...state.conversations.filter(({ id }) => !ids.has(id))];
  state.conversations.sort((a, b) => b.updated - a.updated);
}

/** The current state of a conversation that was drawn: another tab may have changed it since. */
const latest = (drawn) => state.conversations.find(({ id }) => id === drawn.id) ?? drawn;

export function renameChat(drawn, title) {
  const conversation = latest(drawn);
  if (!title.trim() || [drawn.title, conversation.title].includes(title)) return;
  conversation.title = title.trim().slice(0, 200);
  conversation.renamed = Date.now();
  saveNow(conversation);
  update();
}

/** Removes a conversation from this tab. */
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
  if (state.current.id === conversation.id) leave();
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
  link.href = URL.createObjectURL(new Blob([exported(state.conversations)], { type: "application/json" }));
  link.download = `charonia-chats-${new Date().toISOString().slice(0, 10)}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** Imports the chats of a file. A known chat gets the messages that it lacks. */
export async function importChats(file) {
  try {
    const known = new Map(state.conversations.map((one) => [one.id, one]));
    const { found, errors, dropped } = await imported(file);
    const changed = found.flatMap((one) => {
      const mine = known.get(one.id);
      return mine ? (store.adopt(mine, one) ? [mine] : []) : [one];
    });
    restore(changed);
    const said = [changed.length ? text("imported", changed.length) : text("importedNothing")];
    if (errors.length) said.push(text("importedNot", errors.length, errors[0].message));
    if (dropped.length) said.push(text("importedWithout", dropped.join(", ").slice(0, MAX_NAMES)));
    notify(said.join(". "));
  } catch (error) {
    notify(text("importFailed", error.message));
  }
}

export const foundChats = () => state.conversations.filter((one) => store.matches(one, state.query));

// --- Settings of requests

/** The settings of the shown chat: its own, or those of all chats. */
export const settings = () => state.current.settings ?? preferences;

function adjusted(conversation = state.current) {
  conversation.adjusted = Date.now();
  if (state.conversations.includes(conversation)) saveNow(conversation);
  update();
}

export function set(name, value) {
  if (!state.current.settings) {
    setPreference(name, value);
    return update();
  }
  state.current.settings[name] = value;
  adjusted();
}

/** Gives the shown chat its own settings, or the settings of all chats. */
export function setOwn(own) {
  if (own) state.current.settings = requestSettings(preferences);
  else delete state.current.settings;
  adjusted();
}

export function applyPreset(name) {
  for (const [setting, value] of Object.entries(requestSettings(preferences.presets[name]))) set(setting, value);
}

export const savePreset = (name) => setPreference("presets", { ...preferences.presets, [name]: requestSettings(settings()) });

export function removePreset(name) {
  const { [name]: _, ...rest } = preferences.presets;
  setPreference("presets", rest);
  update();
}

export const hasTools = () => Boolean(settings().tools.trim() || preferences.servers.length);

/** Sets the MCP servers, and connects to them. */
export function setServers(servers) {
  setPreference("servers", servers);
  mcp.connectAll(update);
  update();
}

export function switchTools() {
  state.current.toolsOff = !state.current.toolsOff;
  adjusted();
}

// --- Messages

const isRunning = (conversation = state.current) => state.running.has(conversation.id);

/** Text in the composer belongs to its conversation. All new conversations share one draft. */
const draftName = () => (state.current.leaf === null ? "" : state.current.id);
export const currentDraft = () => draft(draftName());
export const keepDraft = (typed) => setDraft(draftName(), typed);

const WAITING = {
  busy: "waitingBusy",
  limit: "waitingLimit",
  away: "waitingAway",
  lost: "waitingLost",
};

/** The reason why a response has not begun, as text; "" if there is no problem. */
export function whyItWaits({ state: why, model, waitS }) {
  if (why === "unloaded") return text("waitingModel", model, waitS);
  if (why === "away" && !waitS) return text("waitingAwayNow");
  return why in WAITING ? text(WAITING[why], waitS) : "";
}

async function answer(conversation, message, begun = false) {
  const controller = new AbortController();
  state.running.set(conversation.id, controller);
  writing.set(message, conversation);
  const waits = setInterval(update, CROWDED_MS + 100); // by then it may be known that it waits for a connection
  state.spoken = text("answering");
  let spokenOf = message.state;
  const changed = () => {
    if (message.state !== spokenOf && message.state !== "waiting") {
      spokenOf = message.state; // a screen reader must not read every second of a wait
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
    // The page's own settings are wrong, so nothing is sent.
    Object.assign(message, { finish: "failed", error: error.message });
    delete message.state;
  }
  clearInterval(waits);
  state.running.delete(conversation.id);
  writing.delete(message);
  state.spoken = message.error ?? text("answered");
  update();
  if (!state.conversations.includes(conversation)) return;
  saveNow(conversation);
  if (message.finish === "tool_calls" && message.toolCalls?.length && mayRun(conversation, message)) runCalls(conversation, message);
}

const answerUnder = (conversation, parent) =>
  answer(conversation, store.add(conversation, parent, { role: "assistant" }));

/** Sends the composer's text. */
export function send(typed) {
  const conversation = state.current;
  if ((!typed.trim() && !state.files.length) || isRunning()) return false;
  keepDraft("");
  const message = store.add(conversation, conversation.leaf, { role: "user", content: typed.trim(), files: state.files });
  conversation.title ||= (typed.trim() || state.files[0].name).split("\n")[0].slice(0, 80);
  state.files = [];
  keep(conversation);
  setAddress("replaceState");
  saveNow(conversation);
  answerUnder(conversation, message.id);
  return true;
}

/** Whether another tab is writing a response to the shown messages. */
export const isWrittenElsewhere = () => !isRunning() && store.path(state.current).some((message) => message.state);

export function stop() {
  if (isWrittenElsewhere()) store.stopElsewhere(state.current.id);
  else state.running.get(state.current.id)?.abort();
}

/** Whether a message that was drawn still exists: another tab may have deleted the chat since. */
const isHere = ({ id }) => id in state.current.messages;

/** Regenerates the response, as a sibling of the old one. */
export function regenerate(message) {
  if (!isRunning() && isHere(message)) answerUnder(state.current, message.parent);
}

export function goOn(drawn) {
  const message = state.current.messages[drawn.id]; // the current state: another tab may have changed or continued it
  if (message && canGoOn(message) && !isRunning()) answer(state.current, message, true);
}

export const canGoOn = (message) =>
  Boolean(message.content) &&
  !message.reasoning &&
  !message.toolCalls?.length &&
  !settings().format && // it would constrain the rest only
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

/** The MCP tool that a call means: {server, tool}. A function of the user's settings hides a tool with its name. */
export function toolOf({ name }, conversation = state.current) {
  const { tools } = conversation.settings ?? preferences;
  return namesOf(tools).has(name) ? undefined : mcp.find(name);
}

function toolId(call, conversation) {
  const { server, tool } = toolOf(call, conversation) ?? {};
  return server && `${server.url} ${tool.name}`;
}

/** Whether the page may run all calls of a message without a question. After many rounds it asks again. */
function mayRun(conversation, message) {
  const shown = store.path(conversation, message.id);
  const sinceUser = shown.slice(shown.findLastIndex(({ role }) => role === "user"));
  const rounds = sinceUser.filter(({ role }) => role === "assistant").length;
  return rounds <= MAX_ROUNDS && message.toolCalls.every((call) => conversation.allowed?.includes(toolId(call, conversation)));
}

/** Sends the results of a response's calls to the model. typed: the results of functions that no MCP server has, by
 * index. always: the calls may run without a question in this chat. */
export async function sendResults(message, typed, always = false) {
  const conversation = state.current;
  if (isRunning(conversation) || !isHere(message)) return;
  if (always) {
    const ids = message.toolCalls.map((call) => toolId(call, conversation)).filter(Boolean);
    conversation.allowed = [...new Set([...(conversation.allowed ?? []), ...ids])];
    adjusted(conversation);
  }
  await runCalls(conversation, message, typed);
}

async function runCalls(conversation, message, typed = []) {
  const controller = new AbortController();
  state.running.set(conversation.id, controller);
  update();
  const { signal } = controller;
  const results = await Promise.all(message.toolCalls.map((call, index) => typed[index] ?? mcp.run(call, signal))).catch(() => null);
  state.running.delete(conversation.id);
  update();
  if (!results || !state.conversations.includes(conversation)) return; // stopped
  let parent = message.id;
  message.toolCalls.forEach((call, index) => {
    parent = store.add(conversation, parent, { role: "tool", content: results[index], toolCallId: call.id }).id;
  });
  answerUnder(conversation, parent);
}

export function showVersion(message) {
  if (!isHere(message)) return;
  store.show(state.current, message);
  saveNow(state.current);
  update();
}

export async function attach(files) {
  const problems = [];
  for (const file of files) {
    try {
      const read = { name: file.name, text: await textOf(file) };
      state.files = [...state.files, read];
    } catch (error) {
      problems.push(error.message);
    }
  }
  if (problems.length) notify(problems.join("\n"));
  update();
}

/** Loads the stored data and contacts the server. draw() draws the state. */
export async function start(draw) {
  redraw = draw;
  show(store.newConversation());
  try {
    state.conversations = await store.open(changedElsewhere);
    forgetDrafts(new Set(state.conversations.map(({ id }) => id)));
  } catch {
    state.stored = false;
  }
  openAddress();
  window.addEventListener("hashchange", openAddress);
  store.answerTabs({ written: () => Array.from(writing.keys(), ({ id }) => id), stop: (id) => state.running.get(id)?.abort() });
  settle();
  window.addEventListener("pagehide", () => {
    for (const message of writing.keys()) breakOff(message);
    new Set([...writing.values(), ...unsaved.keys()]).forEach((conversation) => saveNow(conversation));
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    settle();
    if (outdated) loadModels();
    else if (state.refused) checkRefusal();
  });
  mcp.connectAll(update);
  watch(serverChanged);
  update();
  await loadModels();
}

