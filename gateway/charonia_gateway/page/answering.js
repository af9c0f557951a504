// One response of the model: requests it, waits while the server is overloaded or not reachable, and adds the pieces.

import * as api from "./api.js";
import { path } from "./conversations.js";
import * as mcp from "./mcp.js";
import { namesOf, parseTools, preferences } from "./preferences.js";
import { isWell, look, tell, untilReady } from "./server_watch.js";

/** The fields of a response that is not complete. */
export const MOMENTARY = ["state", "waitS", "waitsFor", "progress"];
const LONGEST_WAIT_S = 30;
const COME_AGAIN = ["busy", "limit", "away", "unloaded"]; // kinds of errors

function userText(message) {
  const fence = (text) => "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map((run) => run[0].length + 1)));
  const files = (message.files ?? []).map(({ name, text }) => `${name}\n${fence(text)}\n${text}\n${fence(text)}`);
  return [...files, message.content].filter(Boolean).join("\n\n");
}

function toApi(message) {
  if (message.role === "user") return { role: "user", content: userText(message) };
  if (message.role === "tool") return { role: "tool", tool_call_id: message.toolCallId, content: message.content };
  const calls = (message.toolCalls ?? []).map(({ id, name, arguments: text }) => ({
    id,
    type: "function",
    function: { name, arguments: text },
  }));
  return { role: "assistant", content: message.content, ...(calls.length && { tool_calls: calls }) };
}

/** The body of the request for a response to `parent`. */
export function requestBody(conversation, parent, model) {
  const messages = path(conversation, parent).map(toApi);
  const settings = conversation.settings ?? preferences;
  if (settings.system.trim()) messages.unshift({ role: "system", content: settings.system });
  const own = namesOf(settings.tools);
  const others = mcp.functions().filter((one) => !own.has(one.function.name));
  const tools = conversation.toolsOff ? [] : [...parseTools(settings.tools), ...others];
  return { ...settings.sampling, model, messages, ...responseFormat(settings), ...(tools.length && { tools }) };
}

function responseFormat({ format, schema, regex }) {
  if (format === "regex") return regex && { structured_outputs: { regex } };
  if (format === "json_schema" && schema.trim()) {
    return { response_format: { type: format, json_schema: { name: "answer", schema: JSON.parse(schema), strict: true } } };
  }
  return format && { response_format: { type: "json_object" } };
}

/** Waits, and calls tick(seconds left) meanwhile. An aborted signal throws early. */
async function pause(seconds, signal, tick) {
  const end = Date.now() + seconds * 1000;
  for (let left = seconds; left > 0; left = (end - Date.now()) / 1000) {
    tick(Math.ceil(left));
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, Math.min(left, 1) * 1000);
      signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
    });
    signal.throwIfAborted();
  }
}

function takeCalls(answer, deltas) {
  answer.toolCalls ??= [];
  for (const delta of deltas) {
    const call = (answer.toolCalls[delta.index] ??= { id: "", name: "", arguments: "" });
    call.id += delta.id ?? "";
    call.name += delta.function?.name ?? "";
    call.arguments += delta.function?.arguments ?? "";
  }
}

const SHORT_MS = 50; // shorter intervals measure only the network's speed

/** The tokens and their speed, as far as the server has measured them; else from the times of arrival. */
function figures({ usage, timings }, begunTokens, ms) {
  const prompt = usage?.prompt_tokens ?? timings.cache_n + timings.prompt_n;
  const completion = usage?.completion_tokens ?? timings.predicted_n;
  return {
    tokensPerS: timings ? timings.predicted_per_second : ms > SHORT_MS ? ((completion - 1) * 1000) / ms : null,
    promptTokens: prompt - begunTokens,
    completionTokens: begunTokens + completion,
  };
}

/** Reads one stream. Times and speed are for this stream, tokens for the whole response, of which begunTokens were there. */
async function take(answer, pieces, begunTokens, changed) {
  const sent = performance.now();
  let first = null;
  let last = null;
  for await (const piece of pieces) {
    const { delta, finish, usage, timings, progress } = piece;
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      last = performance.now();
      first ??= last;
    }
    if (delta.reasoning_content) answer.reasoning = (answer.reasoning ?? "") + delta.reasoning_content;
    if (delta.content) answer.content += delta.content;
    if (delta.tool_calls) takeCalls(answer, delta.tool_calls);
    if (finish) answer.finish = finish;
    if (usage || timings) {
      answer.stats = { firstTokenS: first === null ? null : (first - sent) / 1000, ...figures(piece, begunTokens, last - first) };
    }
    answer.state = progress ? "reading" : "writing";
    answer.progress = progress;
    changed();
  }
}

const isEmpty = (answer) => !answer.content && !answer.reasoning && !answer.toolCalls?.length;

/**
 * Fills `answer`, a message of the assistant. begun = true: continues its text. changed() is called with every piece.
 * model(again) resolves to the name of the model; again: ask the server for its current models. askKey(error) resolves
 * to whether there is another key.
 */
export async function write(conversation, answer, { model, begun, signal, changed, askKey }) {
  Object.assign(answer, { state: "waiting", finish: null, error: null });
  let wait = 1;
  let again = false; // whether the models were requested again
  const before = answer.content;
  const begunTokens = begun ? (answer.stats?.completionTokens ?? 0) : 0;
  for (;;) {
    const fresh = () => (begun ? answer.content === before : isEmpty(answer));
    try {
      answer.model = await model(again);
      if (!conversation.toolsOff) await mcp.settled();
      const body = requestBody(conversation, answer.parent, answer.model);
      if (begun) {
        body.messages.push({ role: "assistant", content: before });
        Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
      }
      await take(answer, api.chat(body, signal), begunTokens, changed);
      tell(null);
      break;
    } catch (error) {
      try {
        if (signal.aborted) throw error;
        if (error.kind === "key" && fresh()) {
          if (!(await askKey(error))) throw error;
        } else if (COME_AGAIN.includes(error.kind) && fresh()) {
          const tick = (seconds) => {
            Object.assign(answer, { state: error.kind, waitS: seconds, waitsFor: error.message });
            changed();
          };
          if (error.kind === "away") look();
          await pause(error.retryAfter ?? wait, signal, tick);
          if (error.kind === "away" && !isWell()) {
            tick(0); // meanwhile the server watch checks its health, which does not count for a key's limits
            await untilReady(signal);
          }
          wait = Math.min(wait * 2, LONGEST_WAIT_S);
        } else if (error.kind === "lost" && fresh()) {
          answer.state = "lost";
          tell(error);
          changed();
          await untilReady(signal);
        } else if (error.kind === "model" && fresh() && !again) {
          again = true;
        } else throw error;
        answer.state = "waiting";
        changed();
      } catch (final) {
        if (signal.aborted) answer.finish = "stopped";
        else Object.assign(answer, { finish: ["away", "lost"].includes(final.kind) ? "broken" : "failed", error: final.message });
        if (final.kind === "lost") tell(final);
        if (final.kind === "away") look();
        break;
      }
    }
  }
  for (const name of MOMENTARY) delete answer[name];
  changed();
}
