// Checks whether the server is up. Tabs share their results, so that one tab checks for all. Over HTTP/1.1 a browser
// opens only six connections to a server, for all tabs together, and each stream needs one.

import { ServerError, onBytes, whyNotReady } from "./api.js";
import { openChannel } from "./site_data.js";

const CALM_S = 20; // between two checks of a healthy server
const ALERT_S = 1; // between two checks of a server with a problem or an unknown state
const RECENT_MS = 35_000; // longest silence of a stream: the gateway sends heartbeats
const TELL_MS = 2000;
const MAX_CONNECTIONS = 6;

/** A message without a response for this time may be waiting for a connection. */
export const CROWDED_MS = 3000;

const channel = openChannel("charonia-server");
const tab = crypto.getRandomValues(new Uint32Array(1))[0];
const streams = new Map(); // other tabs with a stream, and when it last received data
const waiting = new Set(); // callbacks for when the server takes requests
let report = () => {};
let problem = null;
let timer;
let heardAt = 0; // when a stream of any tab last received data
let toldAt = 0;

function heard() {
  heardAt = Date.now();
  if (heardAt - toldAt < TELL_MS) return;
  toldAt = heardAt;
  channel.postMessage({ tab, heard: true });
}

/** Whether streams of other tabs use all of the browser's connections. */
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

/** Schedules the next check, later if another tab has checked. A hidden tab checks only if a message waits. */
function later(seconds = problem ? ALERT_S : CALM_S) {
  clearTimeout(timer);
  timer = setTimeout(() => (document.hidden && !waiting.size ? later() : look()), seconds * (1 + Math.random() / 2) * 1000);
}

/** Reports the result of a request: why the server takes no requests (an Error), or null. */
export function tell(found) {
  channel.postMessage({ tab, problem: found && { kind: found.kind, message: found.message } });
  take(found);
}

/** Checks now. A check without a response may have waited for a connection, while streams show that the server is up.
 */
export async function look() {
  clearTimeout(timer);
  channel.postMessage({ tab, asking: true });
  const found = await whyNotReady();
  if (found?.kind === "silent" && Date.now() - heardAt < RECENT_MS) later();
  else tell(found);
}

/** Whether the server takes requests, as of the last check. */
export const isWell = () => !problem;

/** Resolves when the server takes requests. An aborted signal throws. */
export async function untilReady(signal) {
  let run;
  const ready = new Promise((resolve) => waiting.add((run = resolve)));
  signal.addEventListener("abort", run, { once: true });
  await ready;
  waiting.delete(run);
  signal.throwIfAborted();
}

/** changed(problem, before) is called with each result of this tab or another one; both are an Error or null. */
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
