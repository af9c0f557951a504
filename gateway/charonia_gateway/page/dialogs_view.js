// The dialogs: settings, and the API key.

import { html, nothing } from "./libraries/lit-html/lit-html.js";
import { chatParameters } from "./api.js";
import { language, text } from "./languages.js";
import { revealed } from "./markdown.js";
import * as mcp from "./mcp.js";
import { iconButton } from "./message_view.js";
import { apiKey, isKeyRemembered, PARAMETERS, parseTools, preferences, setApiKey, setPreference } from "./preferences.js";
import * as actions from "./state.js";

const { state } = actions;
let parameters = null; // by name; undefined if the gateway does not describe them
let errors = {}; // rejected input by the setting's name
const orders = {}; // the state of an order to the server, in words

export async function openSettings() {
  state.settingsOpen = true;
  errors = {};
  mcp.connectAll(actions.update); // again to those that failed
  actions.update();
  parameters ??= await chatParameters().catch(() => undefined);
  actions.update();
}

const closeSettings = () => {
  state.settingsOpen = false;
  actions.update();
};

function setSampling(name, value) {
  const { [name]: _, ...rest } = actions.settings().sampling;
  actions.set("sampling", value === null ? rest : { ...rest, [name]: value });
}

/** Also resets the fields: drawing does not replace rejected input or a selected option. */
function resetSampling() {
  actions.set("sampling", {});
  for (const field of document.querySelectorAll(".parameters :is(input, select)")) field.value = "";
}

function range({ minimum, maximum }) {
  if (minimum === undefined) return "";
  if (minimum < -(2 ** 31)) return ""; // any number
  const large = maximum === undefined || maximum >= 2 ** 31 - 1;
  return large ? text("atLeast", minimum) : text("between", minimum, maximum);
}

function parameter(name) {
  const schema = parameters[name];
  if (!schema) return nothing;
  const value = actions.settings().sampling[name];
  const defaults = state.models.get(state.model)?.default_sampling_parameters ?? {};
  const help = text("help")[name] ?? schema.description;
  const change = (event) => {
    const field = event.target;
    if (!field.reportValidity()) return;
    setSampling(name, field.value === "" ? null : schema.enum ? field.value : Number(field.value));
  };
  // JavaScript's numbers are exact only up to 2^53.
  const highest = Math.min(schema.maximum ?? Infinity, Number.MAX_SAFE_INTEGER);
  const lowest = Math.max(schema.minimum ?? -Infinity, Number.MIN_SAFE_INTEGER);
  const field = schema.enum
    ? html`<select id="sampling-${name}" aria-describedby="help-${name}" @change=${change}>
        <option value="" ?selected=${value === undefined}>${text("byDefault")}</option>
        ${schema.enum.map((one) => html`<option ?selected=${one === value}>${one}</option>`)}
      </select>`
    : html`<input id="sampling-${name}" type="number" aria-describedby="help-${name}" placeholder=${defaults[name] ?? text("byDefault")}
        step=${schema.type === "integer" ? 1 : "any"} min=${lowest} max=${highest} .value=${value ?? ""} @change=${change}>`;
  return html`<div class="parameter">
    <label for="sampling-${name}"><code>${name}</code></label>
    ${field}
    <p id="help-${name}" class="hint">${[help, schema.enum ? "" : range(schema)].filter(Boolean).join(" · ")}</p>
  </div>`;
}

const sampling = () =>
  html`<fieldset>
    <legend>${text("sampling")}</legend>
    <p class="hint">${text(parameters === undefined ? "samplingLost" : "samplingHelp")}</p>
    ${parameters ? html`<div class="parameters">${PARAMETERS.map(parameter)}</div>` : nothing}
    <button type="button" class="plain" @click=${resetSampling}>${text("resetSampling")}</button>
  </fieldset>`;

function chooser(name, label, options) {
  const change = (event) => {
    setPreference(name, event.target.value);
    actions.update();
  };
  return html`<label class="row">
    <span>${label}</span>
    <select @change=${change}>
      ${options.map(([value, words]) => html`<option value=${value} ?selected=${preferences[name] === value}>${words}</option>`)}
    </select>
  </label>`;
}

/** A field for code. check() throws an error for the user. */
function codeField(name, check = () => {}) {
  const change = ({ target }) => {
    try {
      check(target.value);
      delete errors[name];
      actions.set(name, target.value);
    } catch (error) {
      errors[name] = text("notSaved", error.message);
      actions.update();
    }
  };
  return html`<label class="block">
    ${text(name)}
    <textarea class="code" rows="4" spellcheck="false" .value=${actions.settings()[name]} @change=${change}></textarea>
    <span class="hint ${errors[name] ? "problem" : ""}" role="status">${errors[name] ?? text(`${name}Help`)}</span>
  </label>`;
}

const FORMATS = ["", "json_object", "json_schema", "regex"];

function answerFormat() {
  const { format } = actions.settings();
  return html`<label class="row">
      <b>${text("format")}</b>
      <select @change=${(event) => actions.set("format", event.target.value)}>
        ${FORMATS.map((one) => html`<option value=${one} ?selected=${one === format}>${text("formats")[one]}</option>`)}
      </select>
    </label>
    ${format === "json_schema" ? codeField("schema", JSON.parse) : nothing} ${format === "regex" ? codeField("regex") : nothing}`;
}

function presets() {
  const save = (event) => {
    event.preventDefault();
    const { name } = event.target.elements;
    actions.savePreset(name.value.trim());
    name.value = "";
    actions.update();
  };
  return html`<fieldset>
    <legend>${text("presets")}</legend>
    <div class="files">
      ${Object.keys(preferences.presets).map(
        (name) => html`<span class="file chip">
          <button type="button" class="link" @click=${() => actions.applyPreset(name)}>${name}</button>
          ${iconButton("close", text("removePreset", name), () => actions.removePreset(name))}
        </span>`,
      )}
    </div>
    <form class="row" @submit=${save}>
      <input name="name" required pattern=".*[^ ].*" maxlength="60" aria-label=${text("presetName")} placeholder=${text("presetName")}>
      <button type="submit" class="plain">${text("savePreset")}</button>
    </form>
  </fieldset>`;
}

function forgetKey() {
  setApiKey("", false);
  actions.notify(text("keyForgotten"));
}

function serverItem(server) {
  const { tools, error, ready } = mcp.status(server);
  const words = error ?? (ready ? tools.map(({ name }) => name).join(", ") || text("noTools") : text("connecting"));
  const remove = () => actions.setServers(preferences.servers.filter((one) => one !== server));
  return html`<li>
    <div class="row"><code>${server.url}</code>${iconButton("close", text("removeServer", server.url), remove)}</div>
    <p class="hint ${error ? "problem" : ""}" role="status">${revealed(words)}</p>
  </li>`;
}

function toolServers() {
  const add = (event) => {
    event.preventDefault();
    const { url, token } = event.target.elements;
    const others = preferences.servers.filter((one) => one.url !== url.value);
    actions.setServers([...others, { url: url.value, token: token.value }]);
    event.target.reset();
  };
  return html`<fieldset>
    <legend>${text("servers")}</legend>
    <p class="hint">${text("serversHelp")}</p>
    <ul class="servers">${preferences.servers.map(serverItem)}</ul>
    <form class="row" @submit=${add}>
      <input name="url" type="url" required pattern="https?://.+" aria-label=${text("serverUrl")} placeholder="https://…/mcp">
      <input name="token" type="password" autocomplete="off" aria-label=${text("serverToken")} placeholder=${text("serverToken")}>
      <button type="submit" class="plain">${text("addServer")}</button>
    </form>
  </fieldset>`;
}

/** Only a server with keys takes this order, from keys of access admin. */
function modelLoader() {
  if (!apiKey()) return nothing;
  const load = async (event) => {
    event.preventDefault();
    const { value } = event.target.elements.model;
    orders.load = text("loadingModel", value);
    actions.update();
    const problem = await actions.addModel(value.trim());
    orders.load = problem ?? text("modelLoaded", value);
    actions.update();
  };
  return html`<fieldset>
    <legend>${text("loadModel")}</legend>
    <form class="row" @submit=${load}>
      <input name="model" required pattern=".*[^ ].*" maxlength="4096" aria-label=${text("loadModel")} placeholder="NAME=owner/model">
      <button type="submit" class="plain">${text("load")}</button>
    </form>
    <p class="hint" role="status">${orders.load ?? text("loadModelHelp")}</p>
  </fieldset>`;
}

const settingsBody = () => html`
  <label class="check">
    <input type="checkbox" .checked=${Boolean(state.current.settings)} @change=${(event) => actions.setOwn(event.target.checked)}>
    ${text("ownSettings")}
  </label>
  <label class="block">
    ${text("systemPrompt")}
    <textarea rows="4" .value=${actions.settings().system} @change=${(event) => actions.set("system", event.target.value)}></textarea>
    <span class="hint">${text("systemHelp")}</span>
  </label>
  ${sampling()} ${answerFormat()} ${codeField("tools", parseTools)} ${toolServers()} ${presets()} ${modelLoader()}
  <fieldset>
    <legend>${text("appearance")}</legend>
    ${chooser("theme", text("theme"), [["", text("themeAuto")], ["light", text("themeLight")], ["dark", text("themeDark")]])}
    ${chooser("language", text("language"), [["", text("languageAuto")], ["en", "English"], ["zh", "中文"]])}
  </fieldset>
  ${apiKey()
    ? html`<fieldset>
        <legend>${text("keyTitle")}</legend>
        <button type="button" class="plain" @click=${forgetKey}>${text("keyForget")}</button>
      </fieldset>`
    : nothing}
  <fieldset>
    <legend>${text("shortcuts")}</legend>
    <dl class="shortcuts">${text("shortcutList").map(([key, what]) => html`<dt><kbd>${key}</kbd></dt><dd>${what}</dd>`)}</dl>
  </fieldset>
  <p><a href="docs" target="_blank" rel="noopener">${text("apiDocs")}</a></p>
`;

const backdrop = (close) => (event) => event.target === event.currentTarget && close();

const opened = new Set(); // ids of open dialogs; a dialog that the user closes stays until its close event

/** Ignores a dialog that the page itself has closed, or has opened again since. */
const byUser = (id, close) => ({ target }) => {
  if (!target.open && opened.delete(id)) close();
};

const settings = () => html`<dialog id="settings" aria-labelledby="settings-title" @close=${byUser("settings", closeSettings)} @click=${backdrop(closeSettings)}>
  <div class="dialog">
    <header><h2 id="settings-title">${text("settings")}</h2>${iconButton("close", text("close"), closeSettings)}</header>
    ${state.settingsOpen ? settingsBody() : nothing}
  </div>
</dialog>`;

function giveKey(event) {
  event.preventDefault();
  const { key, remember } = event.target.elements;
  actions.closeKeyDialog(key.value.replace(/[\u200b-\u200d\u2060\ufeff]/g, "").trim(), remember.checked);
}

const keyBody = (dialog) => html`<form @submit=${giveKey}>
  <p>${apiKey() ? html`${text("keyWrong")} <span class="hint">${dialog.reason}</span>` : text("keyText")}</p>
  <label class="block">
    ${text("keyLabel")}
    <input name="key" type="password" autocomplete="off" required autofocus>
  </label>
  <label class="check"><input name="remember" type="checkbox" .checked=${isKeyRemembered()}>${text("keyRemember")}</label>
  <div class="buttons">
    <button type="button" class="plain" @click=${() => actions.closeKeyDialog("", false)}>${text("cancel")}</button>
    <button type="submit" class="primary">${text("save")}</button>
  </div>
</form>`;

const keyDialog = () => html`<dialog id="key" aria-labelledby="key-title" @close=${byUser("key", () => actions.closeKeyDialog("", false))}>
  <div class="dialog"><header><h2 id="key-title">${text("keyTitle")}</h2></header>${state.keyDialog ? keyBody(state.keyDialog) : nothing}</div>
</dialog>`;

export const dialogs = () => html`${settings()} ${keyDialog()}`;

/** Opens and closes the browser's dialogs to match the state. Does not reopen a dialog that the user has just closed.
 */
export function syncDialogs() {
  for (const [id, open] of [["settings", state.settingsOpen], ["key", state.keyDialog !== null]]) {
    const dialog = document.getElementById(id);
    if (open && !opened.has(id)) {
      opened.add(id);
      dialog.showModal();
    }
    if (!open && opened.delete(id)) dialog.close();
  }
  document.documentElement.lang = language();
  document.documentElement.dataset.theme = preferences.theme;
}
