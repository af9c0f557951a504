// The list of conversations.

import { html, nothing } from "./libraries/lit-html/lit-html.js";
import { live } from "./libraries/lit-html/directives/live.js";
import { repeat } from "./libraries/lit-html/directives/repeat.js";
import { icon } from "./icons.js";
import { text } from "./languages.js";
import { revealed } from "./markdown.js";
import { composes, iconButton } from "./message_view.js";
import * as actions from "./state.js";

const { state } = actions;
let renaming = null; // the conversation, in its state when renaming began

function rename(conversation) {
  renaming = { ...conversation };
  actions.update();
}

// Another tab may rename or move the chat meanwhile. The typed text stays.
function renameField() {
  const end = (event) => {
    if (renaming === null || state.drawing) return;
    const drawn = renaming;
    renaming = null;
    actions.renameChat(drawn, event.target.value);
    actions.update();
  };
  const keys = (event) => {
    event.stopPropagation();
    if (event.key === "Escape") event.target.value = renaming.title;
    if ((event.key === "Enter" && !composes(event)) || event.key === "Escape") event.target.blur();
  };
  return html`<input type="text" maxlength="200" aria-label=${text("rename")} .value=${renaming.title} @keydown=${keys} @blur=${end}>`;
}

/** The address may be the current one, which changes nothing else. */
function closeIfNarrow() {
  state.sidebarOpen = false;
  actions.update();
}

function item(conversation) {
  const current = conversation === state.current;
  return html`<li class="chat-item ${current ? "current" : ""}">
    ${renaming?.id === conversation.id
      ? renameField()
      : html`<a class="chat-title" href=${actions.address(conversation)} dir="auto" aria-current=${current ? "page" : nothing}
            title=${conversation.title} @click=${closeIfNarrow} @dblclick=${() => rename(conversation)}>
            ${state.running.has(conversation.id) ? html`<i class="pulse"></i>` : nothing}${revealed(conversation.title || text("untitled"))}
          </a>
          ${iconButton("edit", `${text("rename")}: ${conversation.title}`, () => rename(conversation))}
          ${iconButton("remove", `${text("remove")}: ${conversation.title}`, (event) => remove(event, conversation))}`}
  </li>`;
}

/** Moves the focus to the undo button, for keyboard users. */
function remove(event, conversation) {
  actions.removeChat(conversation);
  if (event.detail === 0) setTimeout(() => document.querySelector(".notice button")?.focus(), 300);
}

const search = (event) => {
  state.query = event.target.value;
  actions.update();
};

const takeFile = (event) => {
  if (event.target.files[0]) actions.importChats(event.target.files[0]);
  event.target.value = "";
};

export function sidebar(close) {
  const found = actions.foundChats();
  if (renaming && !found.some(({ id }) => id === renaming.id)) renaming = null;
  return html`<nav id="sidebar" class="sidebar" aria-label=${text("chats")}>
    <div class="brand"><img src="page/icon.svg" alt="" width="26" height="26">Charonia${iconButton("close", text("closeSidebar"), close, { className: "narrow-only close" })}</div>
    <button type="button" class="new-chat" @click=${actions.newChat}>${icon("add")}${text("newChat")}</button>
    <label class="search">
      ${icon("search")}
      <input id="search" type="search" placeholder=${text("search")} aria-label=${text("search")} .value=${live(state.query)} @input=${search}>
    </label>
    <ul class="chats">${repeat(found, (one) => one.id, item)}</ul>
    ${found.length ? nothing : html`<p class="hint">${text(state.query ? "noMatch" : "noChats")}</p>`}
    <div class="sidebar-foot">
      <button type="button" class="plain small" ?disabled=${!state.conversations.length} @click=${actions.exportChats}>
        ${icon("export")}${text("exportAll")}
      </button>
      <label class="plain small button">
        ${icon("import")}${text("importChats")}
        <input class="visually-hidden" type="file" accept=".json,.jsonl,.zip,application/json" @change=${takeFile}>
      </label>
    </div>
  </nav>`;
}
