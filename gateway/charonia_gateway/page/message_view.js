// The view of one message.

import { html, nothing } from "./libraries/lit-html/lit-html.js";
import { siblings } from "./conversations.js";
import { icon } from "./icons.js";
import { language, text } from "./languages.js";
import { MarkdownView, copyText, revealed } from "./markdown.js";
import { CROWDED_MS, crowded } from "./server_watch.js";
import * as actions from "./state.js";

const views = new WeakMap(); // message to its MarkdownViews

function shown(message, field) {
  if (!views.has(message)) views.set(message, {});
  const view = (views.get(message)[field] ??= new MarkdownView());
  view.show(message[field], language(), text);
  return view.element;
}

/** Whether a key ends an input composition, for example of Chinese. Safari marks that Enter only by its old key code.
 */
export const composes = (event) => event.isComposing || event.keyCode === 229;

export const iconButton = (name, label, run, { disabled = false, className = "" } = {}) =>
  html`<button type="button" class="icon-button ${className}" title=${label} aria-label=${label} ?disabled=${disabled} @click=${run}>
    ${icon(name)}
  </button>`;

async function copy(message) {
  actions.notify(text((await copyText(message.content)) ? "copied" : "copyFailed"));
}

function versions(message) {
  const all = siblings(actions.state.current, message);
  if (all.length < 2) return nothing;
  const index = all.indexOf(message);
  const to = (step) => () => actions.showVersion(all[index + step]);
  return html`<span class="versions">
    ${iconButton("left", text("previousVersion"), to(-1), { disabled: index === 0 })}
    <span>${index + 1} / ${all.length}</span>
    ${iconButton("right", text("nextVersion"), to(1), { disabled: index === all.length - 1 })}
  </span>`;
}

function editor(message) {
  const submit = (event) => {
    event.preventDefault();
    actions.sendEdited(message, event.target.elements.content.value);
  };
  const keys = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      actions.edit(null);
    }
    if (event.key === "Enter" && !event.shiftKey && !composes(event)) {
      event.preventDefault();
      event.target.form.requestSubmit();
    }
  };
  return html`<form class="editor" @submit=${submit}>
    <textarea name="content" rows="3" aria-label=${text("edit")} .value=${message.content} @keydown=${keys}></textarea>
    <div class="buttons">
      <button type="button" class="plain" @click=${() => actions.edit(null)}>${text("cancel")}</button>
      <button type="submit" class="primary">${text("send")}</button>
    </div>
  </form>`;
}

const fileChips = (files) =>
  files?.length
    ? html`<div class="files">
        ${files.map(
          (file) => html`<details class="file"><summary>${revealed(file.name)}</summary><pre tabindex="0">${revealed(file.text)}</pre></details>`,
        )}
      </div>`
    : nothing;

function userMessage(message, busy) {
  if (actions.state.editing === message.id) return html`<article class="message user editing">${editor(message)}</article>`;
  return html`<article class="message user" aria-label=${text("you")}>
    ${fileChips(message.files)}
    ${message.content ? html`<div class="bubble" dir="auto">${revealed(message.content)}</div>` : nothing}
    <div class="actions">
      ${versions(message)} ${iconButton("copy", text("copy"), () => copy(message))}
      ${iconButton("edit", text("edit"), () => actions.edit(message.id), { disabled: busy })}
    </div>
  </article>`;
}

const pretty = (json) => {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // incomplete or invalid
  }
};

/** The calls of a response. Those of an MCP server run when the user says so; he types the results of others. */
function toolCalls(message, busy, isLast) {
  if (!message.toolCalls?.length) return nothing;
  const waits = isLast && !message.state && message.finish === "tool_calls";
  const servers = waits ? message.toolCalls.map((call) => actions.toolOf(call)?.server.url) : [];
  const runs = servers.some(Boolean);
  const typed = (form) => message.toolCalls.map((_, index) => form.elements[`result-${index}`]?.value);
  const submit = (event) => {
    event.preventDefault();
    actions.sendResults(message, typed(event.target), event.submitter?.value === "always");
  };
  const refuse = () => actions.sendResults(message, message.toolCalls.map(() => "The user did not allow this call."));
  return html`<form class="calls" @submit=${submit}>
    ${message.toolCalls.map(
      (call, index) => html`<div class="call">
        <div class="call-head">
          ${icon("tool")}<span class="visually-hidden">${text("toolCall")}</span><code>${revealed(call.name)}</code>
          ${servers[index] ? html`<span>${servers[index]}</span>` : nothing}
        </div>
        <pre tabindex="0" aria-label=${text("callArguments")}>${revealed(pretty(call.arguments))}</pre>
        ${waits && !servers[index]
          ? html`<textarea name="result-${index}" rows="2" required aria-label="${text("toolResult")}: ${call.name}" placeholder=${text("resultPlaceholder")}></textarea>`
          : nothing}
      </div>`,
    )}
    ${waits && busy ? html`<p class="waiting">${text("callsRun")}</p>` : nothing}
    ${waits && !busy
      ? html`<div class="buttons">
          ${runs
            ? html`<button type="button" class="plain" @click=${refuse}>${text("refuseCall")}</button>
                <button type="submit" class="plain" value="always">${text("runAlways")}</button>`
            : nothing}
          <button type="submit" class="primary">${text(runs ? "runCall" : "sendResult")}</button>
        </div>`
      : nothing}
  </form>`;
}

function reasoning(message) {
  if (!message.reasoning) return nothing;
  const thinking = message.state && !message.content && !message.toolCalls?.length;
  return html`<details class="reasoning">
    <summary class=${thinking ? "thinking" : ""}>${text(thinking ? "reasoningNow" : "reasoning")}</summary>
    ${shown(message, "reasoning")}
  </details>`;
}

function condition(message) {
  switch (message.state) {
    case "waiting":
      if (Date.now() - message.created > CROWDED_MS && crowded()) return html`<p class="waiting">${text("waitingTurn")}</p>`;
      return html`<div class="dots" role="img" aria-label=${text("answering")}><i></i><i></i><i></i></div>`;
    case "reading":
      return html`<p class="waiting">${text("reading", message.progress.processed.toLocaleString(language()), message.progress.total.toLocaleString(language()))}</p>
        <progress max=${message.progress.total} value=${message.progress.processed} aria-label=${text("message")}></progress>`;
    case "busy":
    case "limit":
    case "away": // shows the server's message
      return html`<p class="waiting">${actions.whyItWaits(message)} <span class="hint">(${message.waitsFor})</span></p>`;
    case "unloaded":
    case "lost":
      return html`<p class="waiting">${actions.whyItWaits(message)}</p>`;
  }
  switch (message.finish) {
    case "stopped":
      return html`<p class="ending">${text("stopped")}</p>`;
    case "length":
      return html`<p class="ending">${text("cutOff")}</p>`;
    case "broken":
      return html`<p class="ending problem">${text("brokeOff")}</p>`;
    case "failed":
      return html`<p class="ending problem" role="alert">${text("failed")}: ${message.error}</p>`;
  }
  return nothing;
}

const decimals = (value, digits) =>
  value.toLocaleString(language(), { minimumFractionDigits: digits, maximumFractionDigits: digits });

function stats(message) {
  if (!message.stats) return nothing;
  const { firstTokenS, tokensPerS, completionTokens } = message.stats;
  const parts = [...(message.model ? [message.model] : []), text("tokens", completionTokens ?? 0)];
  if (tokensPerS) parts.push(`${decimals(tokensPerS, tokensPerS < 100 ? 1 : 0)} ${text("tokensPerSecond")}`);
  if (firstTokenS !== null && !message.state) parts.push(text("firstToken", decimals(firstTokenS, 2)));
  return html`<span class="stats">${parts.join(" · ")}</span>`;
}

function assistantMessage(message, busy, isLast) {
  const running = Boolean(message.state);
  return html`<article class="message assistant ${running ? "running" : ""}" aria-label=${text("assistant")} aria-busy=${running}>
    ${reasoning(message)} ${message.content ? shown(message, "content") : nothing} ${toolCalls(message, busy, isLast)}
    ${condition(message)}
    <div class="actions">
      ${running
        ? nothing
        : html`${versions(message)} ${iconButton("copy", text("copy"), () => copy(message))}
          ${iconButton("repeat", text("regenerate"), () => actions.regenerate(message), { disabled: busy })}
          ${isLast && actions.canGoOn(message)
            ? html`<button type="button" class="plain small" ?disabled=${busy} @click=${() => actions.goOn(message)}>
                ${icon("play")} ${text("continue")}
              </button>`
            : nothing}`}
      ${stats(message)}
    </div>
  </article>`;
}

const toolMessage = (message) =>
  html`<article class="message tool" aria-label=${text("toolResult")}>
    <div class="call"><div class="call-head">${icon("tool")}${text("toolResult")}</div><pre tabindex="0">${revealed(message.content)}</pre></div>
  </article>`;

export function messageView(message, { busy, isLast }) {
  if (message.role === "user") return userMessage(message, busy);
  return message.role === "tool" ? toolMessage(message) : assistantMessage(message, busy, isLast);
}
