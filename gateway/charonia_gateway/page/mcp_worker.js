// Requests to MCP servers (the transport Streamable HTTP). This worker has a security policy of its own: it may connect to
// other servers, the page may not. MCP's SDK would need a build step, and compiles code at run time, which the policy
// forbids.
//
// receives {id, server: {url, token}, method, params}, or {cancel: id}; sends {id, result} or {id, error}

import { EventSourceParserStream } from "./libraries/eventsource-parser/dist/stream.js";

const VERSION = "2025-06-18";
const CLIENT = { protocolVersion: VERSION, capabilities: {}, clientInfo: { name: "charonia-chat-page", version: "1" } };
const sessions = new Map(); // by the server's URL and token: a promise of the headers of its session
const running = new Map(); // AbortController by request

async function post({ url, token }, headers, message, signal) {
  const sent = { "Content-Type": "application/json", Accept: "application/json, text/event-stream", ...headers };
  if (token) sent.Authorization = `Bearer ${token}`;
  const body = JSON.stringify({ jsonrpc: "2.0", ...message });
  try {
    return await fetch(url, { method: "POST", headers: sent, body, signal, credentials: "omit", referrerPolicy: "no-referrer" });
  } catch (error) {
    signal.throwIfAborted();
    throw new Error(`it cannot be reached, or does not allow this page to call it (CORS): ${error.message}`);
  }
}

/** The result in a response, which is JSON or a stream that may have other messages too. */
async function resultOf(response, id) {
  if (!response.ok) throw new Error(`${response.status} ${await response.text()}`.slice(0, 500));
  let answer;
  if (response.headers.get("Content-Type")?.startsWith("text/event-stream")) {
    const events = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(new EventSourceParserStream()).getReader();
    for (let read = await events.read(); !read.done && !answer; read = await events.read()) {
      const message = JSON.parse(read.value.data);
      if (message.id === id && !message.method) answer = message; // the server's own requests have ids, too
    }
    events.cancel();
  } else {
    answer = await response.json().catch((error) => {
      throw new Error(`the address is not of an MCP server (Streamable HTTP): ${error.message}`);
    });
  }
  if (!answer) throw new Error("the server sent no result");
  if (answer.error) throw new Error(answer.error.message ?? JSON.stringify(answer.error));
  return answer.result;
}

async function begin(server, signal) {
  const response = await post(server, {}, { id: 0, method: "initialize", params: CLIENT }, signal);
  const { protocolVersion = VERSION } = await resultOf(response, 0);
  const headers = { "MCP-Protocol-Version": protocolVersion };
  const session = response.headers.get("Mcp-Session-Id");
  if (session) headers["Mcp-Session-Id"] = session;
  await post(server, headers, { method: "notifications/initialized" }, signal);
  return headers;
}

async function request({ id, server, method, params }, signal) {
  const key = JSON.stringify([server.url, server.token]);
  const known = sessions.has(key);
  if (!known) sessions.set(key, begin(server, signal));
  try {
    const response = await post(server, await sessions.get(key), { id, method, params }, signal);
    if (response.status === 404 && known) {
      sessions.delete(key); // the session has ended
      return request({ id, server, method, params }, signal);
    }
    return await resultOf(response, id);
  } catch (error) {
    sessions.delete(key);
    throw error;
  }
}

self.onmessage = async ({ data }) => {
  if (data.cancel) return running.get(data.cancel)?.abort(new Error("no response in time"));
  const controller = new AbortController();
  running.set(data.id, controller);
  try {
    self.postMessage({ id: data.id, result: await request(data, controller.signal) });
  } catch (error) {
    self.postMessage({ id: data.id, error: String(error.message ?? error) });
  }
  running.delete(data.id);
};
