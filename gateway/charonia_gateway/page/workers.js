// The page's workers. The security policy lets only this module start them.

const FILES = {
  mcp: "mcp_worker.js",
  pdf: "libraries/pdfjs-dist/legacy/build/pdf.worker.min.mjs",
};

const address = (name) => new URL(FILES[name], import.meta.url).href;
const policy = globalThis.trustedTypes?.createPolicy("charonia-workers", { createScriptURL: address });

export const startWorker = (name) => new Worker(policy ? policy.createScriptURL(name) : address(name), { type: "module" });
