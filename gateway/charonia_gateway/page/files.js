// The text of files that the user attaches.

import { language, text } from "./languages.js";
import { startWorker } from "./workers.js";

const MAX_TEXT_BYTES = 1_000_000;
const MAX_PDF_BYTES = 50_000_000;
const CONTROLS = /[\0-\x08\x0e-\x1a\x1c-\x1f]/; // no text has them

/** Reads a file as text. Throws an error for the user. */
export async function textOf(file) {
  const isPdf = (await file.slice(0, 5).text()) === "%PDF-";
  const tooLarge = (most) => new Error(text("tooLarge", file.name, `${most / 1e6} MB`));
  const most = isPdf ? MAX_PDF_BYTES : MAX_TEXT_BYTES;
  if (file.size > most) throw tooLarge(most);
  const found = isPdf ? await pdfText(file) : decoded(await file.arrayBuffer(), file.name);
  if (found.length > MAX_TEXT_BYTES) throw tooLarge(MAX_TEXT_BYTES);
  return found;
}

/** Without a byte order mark, the text is UTF-8 or in the usual older encoding of the user's language. */
function decoded(buffer, name) {
  const [first, second] = new Uint8Array(buffer);
  const mark = (first << 8) | second;
  const encodings = { 0xfffe: ["utf-16le"], 0xfeff: ["utf-16be"] }[mark] ?? ["utf-8", language() === "zh" ? "gb18030" : "windows-1252"];
  for (const encoding of encodings) {
    try {
      const found = new TextDecoder(encoding, { fatal: true }).decode(buffer);
      if (!CONTROLS.test(found)) return found;
    } catch {
      // another encoding
    }
  }
  throw new Error(text("notText", name));
}

let pdfWorker; // of all PDF files: the end of a task does not destroy a worker that it was given

async function pdfText(file) {
  const pdf = await import("./libraries/pdfjs-dist/legacy/build/pdf.min.mjs");
  pdfWorker ??= new pdf.PDFWorker({ port: startWorker("pdf") });
  const cMapUrl = new URL("libraries/pdfjs-dist/cmaps/", import.meta.url).href;
  const data = await file.arrayBuffer();
  const task = pdf.getDocument({ data, worker: pdfWorker, cMapUrl, useWasm: false, disableFontFace: true, verbosity: 0 });
  try {
    const document = await task.promise;
    const pages = [];
    for (let number = 1; number <= document.numPages; number++) {
      const { items } = await (await document.getPage(number)).getTextContent();
      pages.push(items.map(({ str, hasEOL }) => str + (hasEOL ? "\n" : "")).join(""));
    }
    const found = pages.join("\n\n").trim();
    if (!found) throw new Error(text("noPdfText", file.name));
    return found;
  } catch (error) {
    throw error.name === "Error" ? error : new Error(text("notPdf", file.name, error.message));
  } finally {
    task.destroy();
  }
}
