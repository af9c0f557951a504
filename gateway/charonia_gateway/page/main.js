// The chat page: its layout, the composer, and keyboard shortcuts.

import { html, nothing, render } from "./libraries/lit-html/lit-html.js";
import { repeat } from "./libraries/lit-html/directives/repeat.js";
import { path } from "./conversations.js";
import { dialogs, openSettings, syncDialogs } from "./dialogs_view.js";
import { icon } from "./icons.js";
import { language, text } from "./languages.js";
import { composes, iconButton, messageView } from "./message_view.js";
import { preferences, setPreference } from "./preferences.js";
import { sidebar } from "./sidebar_view.js";
import * as actions from "./state.js";

const { state } = actions;
const NARROW = matchMedia("(max-width: 760px)");
const NEAR_END_PX = 80;
let composerOf = null; // id of the conversation whose draft is in the composer
let following = true; // keeps the end of the conversation in view

const field = () => document.getElementById("composer");
const scroller = () => document.getElementById("scroller");

function toggleSidebar() {
  if (NARROW.matches) state.sidebarOpen = !state.sidebarOpen;
  else setPreference("sidebar", !preferences.sidebar);
  actions.update();
}

/** On a narrow screen the list of chats covers the rest, which then must not be reachable, not even by keyboard. */
const covered = () => NARROW.matches && state.sidebarOpen;
let wasCovered = false;

function moveFocus() {
  if (covered() === wasCovered) return;
  wasCovered = covered();
  document.querySelector(wasCovered ? "#sidebar .close" : ".head .icon-button").focus();
}

// --- Head

const modelChooser = () =>
  html`<select class="model" aria-label=${text("model")} title=${state.model} @change=${(event) => actions.chooseModel(event.target.value)}>
    ${[...state.models.keys()].map((name) => html`<option value=${name} ?selected=${name === state.model}>${name}</option>`)}
  </select>`;

function contextMeter() {
  const all = state.models.get(state.model)?.max_model_len;
  const stats = path(state.current).findLast((message) => message.stats)?.stats;
  if (!all || !stats) return nothing;
  const used = (stats.promptTokens ?? 0) + (stats.completionTokens ?? 0);
  const number = (value) => value.toLocaleString(language());
  const full = used > 0.9 * all;
  const words = text("contextUsed", number(used), number(all));
  return html`<div class="context ${full ? "full" : ""}" title=${full ? `${words}. ${text("contextFull")}` : words}>
    <meter min="0" max=${all} high=${0.9 * all} value=${used} aria-label=${words}></meter>
    <span aria-hidden="true">${number(used)} / ${number(all)}</span>
  </div>`;
}

const sidebarShown = () => (NARROW.matches ? state.sidebarOpen : preferences.sidebar);

const head = () => html`<header class="head">
  <button type="button" class="icon-button" aria-expanded=${sidebarShown()} aria-controls="sidebar"
    title=${text(sidebarShown() ? "closeSidebar" : "openSidebar")}
    aria-label=${text(sidebarShown() ? "closeSidebar" : "openSidebar")} @click=${toggleSidebar}>${icon("menu")}</button>
  ${modelChooser()} ${contextMeter()}
  ${iconButton("add", text("newChat"), () => (actions.newChat(), field().focus()), { className: "narrow-only" })}
  ${iconButton("settings", text("settings"), openSettings)}
</header>`;

function banner() {
  const problem = state.refused ?? state.problem;
  if (!problem) return nothing;
  const words = { origin: "serverRefuses", task: "noChat", lost: "serverLost", silent: "serverLost" }[problem.kind] ?? "serverNotReady";
  return html`<div class="banner" role=${state.refused ? "alert" : "status"}>
    ${text(words)}
    <details><summary>${text("details")}</summary><p>${problem.message}</p></details>
  </div>`;
}

// --- Conversation

function conversation() {
  const messages = path(state.current);
  const busy = state.running.has(state.current.id);
  if (!messages.length) {
    return html`<div class="welcome"><img src="page/icon.svg" alt="" width="64" height="64"><h1>${text("welcome")}</h1><p>${text("welcomeHint")}</p></div>`;
  }
  return html`<div class="messages">
    ${repeat(messages, (message) => message.id, (message, index) => messageView(message, { busy, isLast: index === messages.length - 1 }))}
  </div>`;
}

function noteScroll() {
  const box = scroller();
  const near = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END_PX;
  if (near !== following) {
    following = near;
    actions.update();
  }
}

function toEnd() {
  following = true;
  scroller().scrollTop = scroller().scrollHeight;
  actions.update();
}

// --- Composer

function fit() {
  const area = field();
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight, 0.4 * innerHeight)}px`;
}

function submit(event) {
  event.preventDefault();
  if (state.running.has(state.current.id)) return;
  if (actions.send(field().value)) {
    field().value = "";
    composerOf = state.current.id;
    following = true;
    fit();
  }
}

function composerKeys(event) {
  if (event.key === "Enter" && !event.shiftKey && !composes(event)) {
    event.preventDefault();
    event.target.form.requestSubmit();
  }
  if (event.key === "ArrowUp" && !event.target.value && !state.running.has(state.current.id)) {
    const last = path(state.current).findLast((message) => message.role === "user");
    if (!last) return;
    event.preventDefault();
    actions.edit(last.id);
  }
}

function typed() {
  actions.keepDraft(field().value);
  fit();
}

function pasted(event) {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  actions.attach(event.clipboardData.files);
}

const takeFiles = (event) => {
  actions.attach([...event.target.files]);
  event.target.value = "";
};

const removeFile = (index) => {
  state.files = state.files.filter((_, one) => one !== index);
  actions.update();
};

const fileChip = (file, index) =>
  html`<span class="file chip">${file.name}${iconButton("close", text("removeFile", file.name), () => removeFile(index))}</span>`;

function toolsSwitch() {
  if (!actions.hasTools()) return nothing;
  const on = !state.current.toolsOff;
  const fits = state.models.get(state.model)?.accepts_tools !== false;
  return html`<button type="button" class="icon-button switch" aria-pressed=${on} title=${text(on ? "toolsOn" : "toolsOff")}
      aria-label=${text("toolsSwitch")} @click=${actions.switchTools}>${icon("tool")}</button>
    ${on && !fits ? html`<span class="hint problem" role="status">${text("toolsUnknown", state.model)}</span>` : nothing}`;
}

function composer() {
  const busy = state.running.has(state.current.id);
  return html`<form class="composer" @submit=${submit}>
    ${state.files.length ? html`<div class="files">${state.files.map(fileChip)}</div>` : nothing}
    <textarea id="composer" rows="1" dir="auto" placeholder=${text("placeholder")} aria-label=${text("message")}
      @keydown=${composerKeys} @input=${typed} @paste=${pasted}></textarea>
    <div class="composer-foot">
      <label class="icon-button" title=${text("attach")}>
        ${icon("attach")}<input class="visually-hidden" type="file" multiple aria-label=${text("attach")} @change=${takeFiles}>
      </label>
      ${toolsSwitch()}
      <span class="spacer"></span>
      ${busy || actions.isWrittenElsewhere() ? iconButton("stop", text("stop"), actions.stop, { className: "send stop" }) : nothing}
      ${busy
        ? nothing
        : html`<button type="submit" class="icon-button send" title=${text("send")} aria-label=${text("send")}>${icon("send")}</button>`}
    </div>
  </form>`;
}

const notice = () =>
  html`<div class="notice ${state.notice ? "shown" : ""}" role="status">
    <span>${state.notice?.text}</span>
    ${state.notice?.action
      ? html`<button type="button" class="plain small" @click=${state.notice.action.run}>${state.notice.action.label}</button>`
      : nothing}
  </div>`;

const page = () => html`
  <div class="page ${preferences.sidebar ? "with-sidebar" : ""} ${state.sidebarOpen ? "sidebar-open" : ""}">
    ${sidebar(toggleSidebar)}
    <div class="veil" @click=${toggleSidebar}></div>
    <main ?inert=${covered()}>
      ${head()} ${banner()} ${state.stored ? nothing : html`<div class="banner">${text("storageLost")}</div>`}
      <div id="scroller" class="scroller" @scroll=${noteScroll}>${conversation()}</div>
      <div class="foot">
        ${following ? nothing : iconButton("down", text("toEnd"), toEnd, { className: "to-end" })} ${composer()}
      </div>
    </main>
    ${notice()}
    <div class="visually-hidden" role="status">${state.spoken}</div>
  </div>
  ${dialogs()}
`;

let editingShown = null;
let renamingShown = null;

function draw() {
  const focused = document.activeElement;
  state.drawing = true;
  try {
    render(page(), document.body);
  } finally {
    state.drawing = false;
  }
  if (focused.isConnected && focused !== document.activeElement) focused.focus({ preventScroll: true });
  syncDialogs();
  moveFocus();
  if (composerOf !== state.current.id) {
    composerOf = state.current.id;
    field().value = actions.currentDraft();
    following = true;
    fit();
    if (!NARROW.matches && !document.querySelector("dialog[open], #search:focus, .chat-item input")) field().focus();
  }
  if (state.editing !== editingShown) {
    editingShown = state.editing;
    (document.querySelector(".editor textarea") ?? field()).focus();
  }
  const renaming = document.querySelector(".chat-item input");
  if (renaming !== renamingShown) {
    renamingShown = renaming;
    renaming?.select();
  }
  if (following) scroller().scrollTop = scroller().scrollHeight;
  const { title } = state.current;
  document.title = title ? `${title} · Charonia` : "Charonia";
}

function pageKeys(event) {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (state.sidebarOpen) toggleSidebar();
    else actions.stop();
  }
  if (!event.altKey || event.ctrlKey || event.metaKey) return;
  const run = {
    KeyN: () => (actions.newChat(), field().focus()),
    KeyK: () => {
      if (!sidebarShown()) toggleSidebar();
      document.getElementById("search").focus();
    },
    Comma: openSettings,
  }[event.code];
  if (run) {
    event.preventDefault();
    run();
  }
}

function dropped(event) {
  if (!event.dataTransfer?.files.length) return;
  event.preventDefault();
  actions.attach(event.dataTransfer.files);
}

document.addEventListener("keydown", pageKeys);
document.addEventListener("dragover", (event) => event.dataTransfer?.types.includes("Files") && event.preventDefault());
document.addEventListener("drop", dropped);
NARROW.addEventListener("change", actions.update);
document.querySelector("noscript")?.remove();
await actions.start(draw);
