// The page at /docs: swagger-ui for /openapi.json. If the gateway needs a key that the chat page does not have, asks
// for it.

import { language, text } from "./languages.js";
import { apiKey, isKeyRemembered, setApiKey } from "./preferences.js";

const ADDRESS = "openapi.json";
const SCHEME = "key"; // the name in documentation.py

/** definition: {spec} or {url}. */
function show(definition) {
  const ui = globalThis.SwaggerUIBundle({
    ...definition,
    dom_id: "#swagger-ui",
    deepLinking: true,
    onComplete() {
      ui.specActions.updateUrl(ADDRESS); // shown as a link
      if (apiKey()) ui.preauthorizeApiKey(SCHEME, apiKey());
    },
  });
}

function made(name, properties, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

/** A form in the style of swagger-ui. */
function ask(reason) {
  const field = made("input", { type: "password", autocomplete: "off", required: true });
  const form = made(
    "form",
    { className: "wrapper", lang: language() },
    made("h1", { className: "title" }, text("keyTitle")),
    made("p", { role: "alert" }, apiKey() ? `${text("keyWrong")} ${reason}` : text("keyText")),
    made("label", {}, text("keyLabel"), " ", field),
    made("button", { className: "btn" }, text("save")),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    setApiKey(field.value.trim(), isKeyRemembered());
    open();
  });
  document.querySelector("main").replaceChildren(form);
  field.focus();
}

async function open() {
  const headers = new Headers();
  try {
    if (apiKey()) headers.set("Authorization", `Bearer ${apiKey()}`);
  } catch {
    return ask(""); // it contains characters that are not valid in a header
  }
  const answer = await fetch(ADDRESS, { headers, cache: "no-store" }).catch(() => null);
  const content = await answer?.json().catch(() => null);
  if ([401, 403].includes(answer?.status)) ask(content?.error?.message ?? "");
  else show(answer?.ok && content ? { spec: content } : { url: ADDRESS }); // swagger-ui shows the error
}

await open();
