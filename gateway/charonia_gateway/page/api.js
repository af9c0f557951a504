// Requests to this page's gateway, and the meaning of their failures.

import { EventSourceParserStream } from "./libraries/eventsource-parser/dist/stream.js";
import { text } from "./languages.js";
import { apiKey } from "./preferences.js";

/** Why a request failed. kind: "key" (the server needs another key), "busy" (retry after retryAfter seconds), "limit"
 * (as busy: the key's limit is reached), "unloaded" (the model is not loaded), "away" (the server or Triton is not
 * available), "lost" (the connection failed or broke), "silent" (no response in time), "model" (the server has another
 * model), "origin" (the server does not accept this page), "task" (no model gives text), "refused" (the request is wrong). key: the key of the request. */
export class ServerError extends Error {
  constructor(kind, message, { retryAfter = null, key = null } = {}) {
    super(message);
    Object.assign(this, { kind, retryAfter, key });
  }
}

// By the code of the gateway's error. An error without a code, for example of a proxy, is mapped by its status.
const BY_CODE = {
  access_denied: "key",
  deadline_exceeded: "busy",
  model_not_found: "model",
  model_not_loaded: "unloaded",
  origin_not_allowed: "origin",
  overloaded: "busy",
  rate_limit_exceeded: "limit",
  service_unavailable: "away",
};
const BY_STATUS = { 401: "key", 429: "busy", 502: "away", 503: "away", 504: "away" };

async function failure(response, key) {
  const sent = await response.text().catch(() => "");
  let message = sent.trimStart().startsWith("<") ? "" : sent.slice(0, 500); // a proxy's HTML page adds nothing to its status
  let code = null;
  try {
    const body = JSON.parse(sent);
    code = body.error?.code;
    message = body.error?.message ?? body.reason ?? body.detail ?? message;
  } catch {
    // no JSON
  }
  const kind = BY_CODE[code] ?? BY_STATUS[response.status] ?? "refused";
  if (kind === "origin") return new ServerError(kind, text("originRefused", location.origin));
  if (kind === "key" && !key) return new ServerError(kind, text("keyText")); // the server's message is for programs
  const seconds = Number.parseFloat(response.headers.get("Retry-After"));
  const retryAfter = Number.isFinite(seconds) ? Math.min(Math.max(seconds, 0), 3600) : null;
  return new ServerError(kind, [response.status, message || response.statusText].filter(Boolean).join(": "), { retryAfter, key });
}

const HEALTH = "health/ready"; // which needs no key

async function request(path, { body, signal } = {}) {
  const headers = {};
  const key = apiKey();
  const fits = /^[\x21-\x7e]+( +[\x21-\x7e]+)*$/.test(key); // valid in a header
  if (key && !fits && path !== HEALTH) throw new ServerError("key", text("keyCharacters"), { key });
  if (key && fits) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
      referrerPolicy: "no-referrer",
    });
  } catch (error) {
    if (error.name === "TimeoutError") throw new ServerError("silent", String(error.message));
    if (signal?.aborted) throw error;
    throw new ServerError("lost", String(error.message ?? error));
  }
  if (!response.ok) throw await failure(response, key);
  return response;
}

const json = async (path, options) => (await request(path, options)).json();

/** The descriptions of the models that give text, by name. The server may have none of a key's models. */
export async function models() {
  const key = apiKey();
  const { data } = await json("v1/models");
  if (!data.length) throw new ServerError("key", text("noModels"), { key });
  return new Map(data.filter(({ task }) => task !== "embed" && task !== "score").map((model) => [model.id, model]));
}

/** Loads a model, or adds one ("NAME=MODEL"), and resolves when it is ready. Needs a key of access admin. */
export const loadModel = (model) => json("models/load", { body: { model } });

/** Why requests cannot be served now, or null. */
export async function whyNotReady() {
  try {
    await request(HEALTH, { signal: AbortSignal.timeout(8000) });
    return null;
  } catch (error) {
    if (error instanceof ServerError && error.kind === "key") return null; // the server is up
    return error;
  }
}

/** Why the server rejects this page's requests, or null. The server checks the origin only of requests that change
 * something. */
export async function whyNotThisPage(model) {
  try {
    await request("tokenize", { body: { model, prompt: "a" } });
  } catch (error) {
    if (error.kind === "origin") return error;
  }
  return null;
}

/** The schemas of a chat request's parameters by name, from the gateway's OpenAPI document. */
export async function chatParameters() {
  const document = await json("openapi.json");
  const found = {};
  for (const [name, schema] of Object.entries(document.components.schemas.ChatRequest.properties)) {
    const value = schema.anyOf?.find((one) => one.type !== "null") ?? schema;
    found[name] = { ...value, description: schema.description ?? value.description ?? "" };
  }
  return found;
}

let bytesCame = () => {};

/** run() is called whenever a stream receives data, including heartbeats. */
export const onBytes = (run) => (bytesCame = run);

const noting = () =>
  new TransformStream({
    transform(bytes, controller) {
      bytesCame();
      controller.enqueue(bytes);
    },
  });

/** The chunks of a streamed response. */
async function* stream(path, body, signal) {
  const key = apiKey(); // the key of this request; it may have changed when an error arrives
  const response = await request(path, {
    body: { ...body, stream: true, stream_options: { include_usage: true }, timings_per_token: true, return_progress: true },
    signal,
  });
  const events = response.body.pipeThrough(noting()).pipeThrough(new TextDecoderStream()).pipeThrough(new EventSourceParserStream());
  const reader = events.getReader();
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ServerError("lost", String(error.message ?? error));
    }
    if (read.done) throw new ServerError("lost", "the answer broke off");
    if (read.value.data === "[DONE]") return;
    const chunk = JSON.parse(read.value.data);
    if (chunk.error) {
      throw new ServerError(BY_CODE[chunk.error.code] ?? "refused", chunk.error.message ?? "error", { key });
    }
    yield chunk;
  }
}

/** The pieces of a response to a conversation: {delta, finish, usage, timings, progress}. */
export async function* chat(body, signal) {
  for await (const chunk of stream("v1/chat/completions", body, signal)) {
    const choice = chunk.choices?.[0];
    yield {
      delta: choice?.delta ?? {},
      finish: choice?.finish_reason,
      usage: chunk.usage,
      timings: chunk.timings,
      progress: chunk.prompt_progress,
    };
  }
}
