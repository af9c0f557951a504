// Formulas in Markdown: $…$ and \(…\) within a line, $$…$$ and \[…\] as a display. A plugin of markdown-it: it creates
// elements with the TeX in data-formula, for KaTeX.

const PAIRS = [
  { open: "$$", close: "$$", display: true },
  { open: "\\[", close: "\\]", display: true },
  { open: "\\(", close: "\\)", display: false },
  { open: "$", close: "$", display: false },
];

const LONGEST = 10_000; // characters; bounds the cost of an opening without an end

/** The delimiters that begin at `position`, and the position of their end. Dollar amounts are not formulas: as in
 * pandoc, there is no space next to a dollar inside, and no digit after the closing dollar. */
function formulaAt(source, position, limit) {
  const pair = PAIRS.find(({ open }) => source.startsWith(open, position));
  if (!pair) return null;
  const begin = position + pair.open.length;
  const near = source.slice(begin, Math.min(begin + LONGEST, limit));
  let length = near.indexOf(pair.close);
  while (length > 0 && near[length - 1] === "\\" && pair.close[0] === "$") length = near.indexOf(pair.close, length + 1);
  if (length <= 0) return null;
  const end = begin + length;
  const formula = source.slice(begin, end);
  if (pair.open === "$" && (/^\s|\s$|\n\n/.test(formula) || /\d/.test(source[end + 1] ?? ""))) return null;
  return { formula: formula.trim(), display: pair.display, end: end + pair.close.length };
}

function inline(state, silent) {
  const first = state.src[state.pos];
  if (first !== "$" && first !== "\\") return false;
  const found = formulaAt(state.src, state.pos, state.posMax);
  if (!found) return false;
  if (!silent) Object.assign(state.push("formula", "span", 0), { content: found.formula, meta: found.display });
  state.pos = found.end;
  return true;
}

function block(state, startLine, endLine, silent) {
  const begin = state.bMarks[startLine] + state.tShift[startLine];
  if (!state.src.startsWith("$$", begin) && !state.src.startsWith("\\[", begin)) return false;
  const found = formulaAt(state.src, begin, state.eMarks[endLine - 1]);
  if (!found) return false;
  let line = startLine;
  while (line < endLine && state.eMarks[line] < found.end) line++;
  if (state.src.slice(found.end, state.eMarks[line]).trim()) return false; // text follows: the formula is part of a paragraph
  if (silent) return true;
  Object.assign(state.push("formula", "span", 0), {
    content: found.formula,
    meta: true,
    block: true,
    map: [startLine, line + 1],
  });
  state.line = line + 1;
  return true;
}

export function formulas(markdown) {
  const { escapeHtml } = markdown.utils;
  markdown.inline.ruler.before("escape", "formula", inline);
  markdown.block.ruler.before("fence", "formula", block, { alt: ["paragraph", "blockquote", "list"] });
  markdown.renderer.rules.formula = (tokens, index) => {
    const { content, meta, block: isBlock } = tokens[index];
    const span = `<span class="formula" data-formula="${escapeHtml(content)}" data-display="${meta}">${escapeHtml(content)}</span>`;
    return isBlock ? `<p>${span}</p>\n` : span;
  };
}
