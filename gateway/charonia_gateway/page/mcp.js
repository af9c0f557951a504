// The tools of the MCP servers that the user has added. mcp_worker.js sends the requests.

import { preferences } from "./preferences.js";
import { startWorker } from "./workers.js";

const CONNECT_MS = 120_000;
const SETTLE_MS = 10_000; // after that, messages do not wait for a server
const MAX_PAGES = 50;
const MAX_TOOLS = 500; // of a server
const MAX_RESULT = 1_000_000; // characters

let worker;
let requests = 0;
const waiting = new Map(); // callbacks by request
const connected = new Map(); // by server of the preferences: {tools, error, ready, settled}

function call(server, method, params, signal) {
  if (!worker) {
    worker = startWorker("mcp");
    worker.onmessage = ({ data: { id, result, error } }) => {
      const { resolve, reject } = waiting.get(id);
      waiting.delete(id);
      if (error === undefined) resolve(result);
      else reject(new Error(error));
    };
  }
  const id = ++requests;
  signal.addEventListener("abort", () => worker.postMessage({ cancel: id }), { once: true });
  return new Promise((resolve, reject) => {
    waiting.set(id, { resolve, reject });
    worker.postMessage({ id, server, method, params });
  });
}

async function connect(server) {
  const signal = AbortSignal.timeout(CONNECT_MS);
  const tools = [];
  let params = {};
  for (let page = 0; params && page < MAX_PAGES; page++) {
    const { tools: more, nextCursor } = (await call(server, "tools/list", params, signal)) ?? {};
    if (!Array.isArray(more)) throw new Error("the server sent no list of tools");
    tools.push(...more.filter(isTool));
    params = nextCursor && { cursor: nextCursor };
  }
  return tools.slice(0, MAX_TOOLS);
}

/** Whether a server's description of a tool has the form that the API needs. */
const isTool = (tool) => tool?.name && typeof tool.name === "string" && tool.inputSchema?.type === "object";

/** Connects to the servers that have no connection. changed() is called with each result. */
export function connectAll(changed) {
  for (const server of connected.keys()) if (!preferences.servers.includes(server)) connected.delete(server);
  for (const server of preferences.servers) {
    if (connected.has(server) && !status(server).error) continue;
    const state = { tools: [] };
    connected.set(server, state);
    const done = connect(server).then((tools) => (state.tools = tools), (error) => (state.error = error.message));
    const ready = done.then(() => ((state.ready = true), changed()));
    state.settled = Promise.race([ready, new Promise((resolve) => setTimeout(resolve, SETTLE_MS))]);
  }
}

/** Resolves when each server has responded, has failed, or has had SETTLE_MS. */
export const settled = () => Promise.all([...connected.values()].map(({ settled }) => settled));

/** {tools, error, ready} of a server. */
export const status = (server) => connected.get(server) ?? { tools: [] };

/** All tools by the name that the model uses: {server, tool}. Two servers may have tools of one name. */
function named() {
  const found = new Map();
  for (const [server, { tools }] of connected) {
    for (const tool of tools) {
      const plain = tool.name.replace(/[^\w-]/g, "_").slice(0, 60);
      let name = plain;
      for (let number = 2; found.has(name); number++) name = `${plain}_${number}`;
      found.set(name, { server, tool });
    }
  }
  return found;
}

export const find = (name) => named().get(name);

/** The tools as functions of the API. */
export const functions = () =>
  [...named()].map(([name, { tool }]) => ({
    type: "function",
    function: { name, description: String(tool.description ?? tool.title ?? ""), parameters: tool.inputSchema },
  }));

/** The result of a call as text for the model. Throws only if the signal is aborted. */
export async function run({ name, arguments: text }, signal) {
  try {
    const { server, tool } = find(name);
    const params = { name: tool.name, arguments: text.trim() ? JSON.parse(text) : {} };
    const { content = [], structuredContent, isError } = await call(server, "tools/call", params, signal);
    const parts = content.map((part) => part.text ?? part.resource?.text ?? part.uri ?? `[${part.type}]`);
    if (!parts.length && structuredContent) parts.push(JSON.stringify(structuredContent));
    const result = parts.join("\n\n");
    const cut = result.length > MAX_RESULT ? `${result.slice(0, MAX_RESULT)}\n[${result.length - MAX_RESULT} more characters]` : result;
    return (isError ? "Error: " : "") + cut;
  } catch (error) {
    signal.throwIfAborted();
    return `Error: ${error.message}`;
  }
}
