// Converts a model's Markdown to elements. A model is not trusted: nothing in its text is run or fetched.
//
// HTML in Markdown stays text (html: false). DOMPurify also cleans the output of markdown-it. Images become links, and
// links have only http, https and mailto. Characters that hide or reorder text are shown.

import MarkdownIt from "./libraries/markdown-it/dist/browser/markdown-it.esm.min.mjs";
import footnotes from "./libraries/markdown-it-footnote/index.mjs";
import DOMPurify from "./libraries/dompurify/dist/purify.es.mjs";
import { formulas } from "./formulas.js";

const LINK = /^(https?:\/\/|mailto:)/i;
const ALLOWED = {
  ALLOWED_TAGS: [
    ..."a blockquote br code del div em h1 h2 h3 h4 h5 h6 hr li ol p pre s span strong sup table tbody td th thead tr ul".split(" "),
  ],
  ALLOWED_ATTR: ["class", "href", "start", "title", "data-align", "data-formula", "data-display"],
  ALLOWED_URI_REGEXP: LINK,
  ADD_URI_SAFE_ATTR: ["start", "data-align", "data-formula", "data-display"], // these are not addresses
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
// Bidirectional controls, soft hyphens, zero-width characters (except joiners and non-joiners), fillers, and tag
// characters and the later variation selectors, which can spell hidden text.
const HIDDEN = /[\u00ad\u034f\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\u3164\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}\u{e0100}-\u{e01ef}]/gu;
const FLAG = /\u{1f3f4}[\u{e0020}-\u{e007f}]+/gu;

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true, maxNesting: 40 });
markdown.use(formulas).use(footnotes);
markdown.validateLink = (url) => LINK.test(url);
markdown.renderer.rules.image = (tokens, index) => {
  const { escapeHtml } = markdown.utils;
  const token = tokens[index];
  const source = escapeHtml(token.attrGet("src") ?? "");
  return `<a class="picture" href="${source}">${escapeHtml(token.content || token.attrGet("src") || "")}</a>`;
};
for (const name of ["th_open", "td_open"]) {
  // The page's policy does not allow style attributes.
  markdown.renderer.rules[name] = (tokens, index, options, _env, self) => {
    const style = tokens[index].attrGet("style");
    if (style) tokens[index].attrs = [["data-align", style.replace("text-align:", "")]];
    return self.renderToken(tokens, index, options);
  };
}

// Footnotes without links, because the page's address names the chat.
Object.assign(markdown.renderer.rules, {
  footnote_ref: (...all) => `<sup>${markdown.renderer.rules.footnote_caption(...all)}</sup>`,
  footnote_block_open: () => '<hr><ol class="footnotes">',
  footnote_block_close: () => "</ol>",
  footnote_open: () => "<li>",
  footnote_anchor: () => "",
});
markdown.inline.ruler.before("autolink", "line_break", (state, silent) => {
  const found = /^<br\s*\/?>/i.exec(state.src.slice(state.pos, state.pos + 10));
  if (!found) return false;
  if (!silent) state.push("hardbreak", "br", 0);
  state.pos += found[0].length;
  return true;
});
markdown.core.ruler.after("text_join", "tasks", ({ tokens }) => {
  tokens.forEach((token, index) => {
    const item = tokens[index - 2];
    const mark = item?.type === "list_item_open" && /^\[([ xX])\]\s/.exec(token.children?.[0]?.content ?? "");
    if (!mark) return;
    item.attrJoin("class", "task");
    token.children[0].content = (mark[1] === " " ? "☐ " : "☑ ") + token.children[0].content.slice(mark[0].length);
  });
});

/** The HTML of each top-level block. */
function blocks(text) {
  const environment = {};
  const tokens = markdown.parse(text, environment);
  const found = [];
  let begin = 0;
  let depth = 0;
  tokens.forEach((token, index) => {
    depth += token.nesting;
    if (depth === 0) {
      found.push(markdown.renderer.render(tokens.slice(begin, index + 1), markdown.options, environment));
      begin = index + 1;
    }
  });
  return found;
}

function* textNodes(root) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) yield walker.currentNode;
}

/** The text in pieces, with an element for each hidden character that shows its code. */
export function revealed(text) {
  if (text.search(HIDDEN) < 0) return [text];
  const flags = [...text.matchAll(FLAG)].map((match) => [match.index, match.index + match[0].length]);
  const hidden = [...text.matchAll(HIDDEN)].filter(({ index }) => !flags.some(([begin, end]) => begin <= index && index < end));
  const pieces = [];
  let end = 0;
  for (const match of hidden) {
    const mark = document.createElement("span");
    mark.className = "hidden-character";
    mark.textContent = `U+${match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
    pieces.push(text.slice(end, match.index), mark);
    end = match.index + match[0].length;
  }
  return [...pieces, text.slice(end)];
}

function reveal(root) {
  for (const node of [...textNodes(root)]) {
    const pieces = revealed(node.data);
    if (pieces.length > 1) node.replaceWith(...pieces);
  }
}

const unfinished = new Set(); // callbacks that wait for a library that could not be fetched

/** Runs the callbacks again after the server was not available. */
export function finish() {
  const all = [...unfinished];
  unfinished.clear();
  all.forEach((run) => run());
}

/** A library, fetched on first use; null on failure. Then finish() calls again(). */
function lazily(load) {
  let loading;
  let failures = 0; // a browser may cache a failed import by its address
  return async (again) => {
    const mine = (loading ??= load(failures ? `?${failures}` : ""));
    try {
      const library = await mine;
      if (failures) finish();
      return library;
    } catch {
      unfinished.add(again);
      if (loading === mine) {
        loading = undefined;
        failures++;
      }
      return null;
    }
  };
}

const highlighter = lazily((retry) => import(`./libraries/@highlightjs/cdn-assets/es/highlight.min.js${retry}`));

/** Highlights a block of code when the library is loaded. */
async function highlight(code, source, language) {
  const library = await highlighter(() => code.isConnected && highlight(code, source, language));
  if (!library) return;
  const { default: hljs } = library;
  if (!hljs.getLanguage(language) || source.length > 100_000) return;
  const html = hljs.highlight(source, { language, ignoreIllegals: true }).value;
  code.replaceChildren(DOMPurify.sanitize(html, { ...ALLOWED, ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"] }));
  reveal(code);
}

function styles(href) {
  const link = document.createElement("link");
  return new Promise((resolve, reject) => {
    link.addEventListener("load", resolve);
    link.addEventListener("error", () => (link.remove(), reject(new Error(href))));
    Object.assign(link, { rel: "stylesheet", href });
    document.head.append(link);
  });
}

const typesetter = lazily((retry) =>
  Promise.all([styles(`page/libraries/katex/dist/katex.min.css${retry}`), import(`./libraries/katex/dist/katex.min.js${retry}`)]),
);

const MAX_DEPTH = 400; // of elements in each other: a browser tab crashes at some thousand

function isDeep(root) {
  for (const node of textNodes(root)) {
    let depth = 0;
    for (let above = node; above !== root; above = above.parentNode) depth++;
    if (depth > MAX_DEPTH) return true;
  }
  return false;
}

async function typeset(element) {
  if (!(await typesetter(() => element.isConnected && typeset(element)))) return;
  const { formula, display } = element.dataset;
  if (revealed(formula).length > 1) return; // keep the marks: KaTeX would hide them again
  const made = document.createElement("span");
  const options = {
    displayMode: display === "true",
    throwOnError: false,
    errorColor: "inherit",
    trust: false, // no links, images or classes from the model
    strict: "ignore",
    maxSize: 30,
    maxExpand: 200,
  };
  try {
    globalThis.katex.render(formula, made, options);
  } catch (error) {
    if (error instanceof RangeError) return; // KaTeX had no stack left: the formula is too deep and stays text
    throw error;
  }
  if (!isDeep(made)) element.replaceChildren(...made.childNodes);
}

/** Runs before hidden characters are revealed, so that copying and highlighting use the original text. */
function codeBlock(pre, texts) {
  const code = pre.querySelector("code") ?? pre;
  const source = code.textContent;
  const language = /(?:^|\s)language-(\S+)/.exec(code.className)?.[1] ?? "";
  const box = document.createElement("div");
  box.className = "code-block";
  const head = document.createElement("div");
  head.className = "code-head";
  const name = document.createElement("span");
  name.textContent = language;
  const copy = document.createElement("button");
  copy.type = "button";
  copy.textContent = texts("copy");
  copy.setAttribute("aria-label", texts("copyCode"));
  copy.addEventListener("click", async () => {
    copy.textContent = texts((await copyText(source)) ? "copied" : "copyFailed");
    setTimeout(() => (copy.textContent = texts("copy")), 1500);
  });
  head.append(name, copy);
  pre.tabIndex = 0; // so that the keyboard can scroll it
  pre.replaceWith(box);
  box.append(head, pre);
  if (language) highlight(code, source, language);
}

function table(element) {
  const box = document.createElement("div");
  box.className = "table";
  box.tabIndex = 0;
  element.replaceWith(box);
  box.append(element);
}

/** The elements of each block. Cleaning them together takes a fraction of the time. */
function elements(htmls, texts) {
  const fragment = DOMPurify.sanitize(htmls.map((html) => `<div>${html}</div>`).join(""), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
    link.title = link.href;
  }
  const made = [...fragment.children].map(({ childNodes }) => childNodes);
  fragment.querySelectorAll("pre").forEach((pre) => codeBlock(pre, texts));
  fragment.querySelectorAll("table").forEach(table);
  fragment.querySelectorAll("[data-formula]").forEach(typeset);
  reveal(fragment);
  return made.map((nodes) => [...nodes]);
}

/** Copies a text. Without TLS pages have no clipboard API, but can copy a selection. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

/** Shows a growing text in an element. Unchanged blocks keep their elements. */
export class MarkdownView {
  #shown = []; // {html, nodes}
  #text = null;
  #language = null;

  constructor() {
    this.element = document.createElement("div");
    this.element.className = "markdown";
    this.element.dir = "auto";
  }

  /** texts(name): the text in the user's `language`. */
  show(text, language, texts) {
    if (text === this.#text && language === this.#language) return;
    const made = blocks(text);
    let same = 0;
    if (language === this.#language) while (same < made.length && made[same] === this.#shown[same]?.html) same++;
    for (const { nodes } of this.#shown.splice(same)) nodes.forEach((node) => node.remove());
    const added = made.slice(same);
    elements(added, texts).forEach((nodes, index) => {
      this.element.append(...nodes);
      this.#shown.push({ html: added[index], nodes });
    });
    this.#text = text;
    this.#language = language;
  }
}
