// Whether the server answers. Tabs tell each other what they have heard of it, so that one asks for all: a browser opens six
// connections to a server over HTTP/1.1, all tabs together, and each stream of an answer holds one.

import { ServerError, onBytes, whyNotReady } from "./api.js";
import { openChannel } from "./site_data.js";

const CALM_S = 20; // between two questions to a server that is well
const ALERT_S = 1; // and to one that is not, or of which nothing is known
const RECENT_MS = 35_000; // a stream is not silent for longer: the gateway sends heartbeats
const TELL_MS = 2000;
const MAX_CONNECTIONS = 6;

/** A message that has waited for so long, and without a word of its own, may wait for a connection. */
export const CROWDED_MS = 3000;

const channel = openChannel("charonia-server");
const tab = crypto.getRandomValues(new Uint32Array(1))[0];
const streams = new Map(); // other tabs with a stream, to when it last had something
const waiting = new Set(); // what is called when the server takes requests
let report = () => {};
let problem = null;
let timer;
let heardAt = 0; // when a stream of any tab last had something
let toldAt = 0;

function heard() {
  heardAt = Date.now();
  if (heardAt - toldAt < TELL_MS) return;
  toldAt = heardAt;
  channel.postMessage({ tab, heard: true });
}

/** Whether answers of other tabs have all of the browser's connections. */
export function crowded() {
  const recent = [...streams.values()].filter((at) => Date.now() - at < RECENT_MS);
  return recent.length >= MAX_CONNECTIONS;
}

function take(found) {
  const before = problem;
  problem = found;
  later();
  if (!found) {
    waiting.forEach((run) => run());
    waiting.clear();
  }
  if (found || before) report(found, before);
}

/** A tab that hears of another's question asks later itself. One that nobody sees asks only for a message that waits. */
function later(seconds = problem ? ALERT_S : CALM_S) {
  clearTimeout(timer);
  timer = setTimeout(() => (document.hidden && !waiting.size ? later() : look()), seconds * (1 + Math.random() / 2) * 1000);
}

/** Says what a request has shown: why the server takes none (an Error), or that it does (null). */
export function tell(found) {
  channel.postMessage({ tab, problem: found && { kind: found.kind, message: found.message } });
  take(found);
}

/** Asks now. A question without an answer may have waited for a connection, behind streams of an answering server. */
export async function look() {
  clearTimeout(timer);
  channel.postMessage({ tab, asking: true });
  const found = await whyNotReady();
  if (found?.kind === "silent" && Date.now() - heardAt < RECENT_MS) later();
  else tell(found);
}

/** Whether the server takes requests, as far as is known. */
export const isWell = () => !problem;

/** Resolves once the server takes requests. Throws with the signal. */
export async function untilReady(signal) {
  let run;
  const ready = new Promise((resolve) => waiting.add((run = resolve)));
  signal.addEventListener("abort", run, { once: true });
  await ready;
  waiting.delete(run);
  signal.throwIfAborted();
}

/** changed(problem, before) is called with what this tab or another has found; both are an Error or null. */
export function watch(changed) {
  report = changed;
  onBytes(heard);
  channel.onmessage = ({ data }) => {
    if (data.asking) return later();
    if (data.heard) return streams.set(data.tab, (heardAt = Date.now()));
    streams.delete(data.tab);
    take(data.problem && new ServerError(data.problem.kind, data.problem.message));
  };
  document.addEventListener("visibilitychange", () => !document.hidden && look());
  window.addEventListener("online", look);
  later(ALERT_S);
}
