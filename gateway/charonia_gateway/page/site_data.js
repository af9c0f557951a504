// What the browser keeps for this site, and the way between its tabs. Where it gives none (site data blocked) or has no more
// room, values hold until the page is closed, and the tab is alone.

function guarded(name) {
  const memory = new Map(); // what could not be kept; it counts before what is kept
  const attempt = (run, otherwise) => {
    try {
      return run(globalThis[name]);
    } catch {
      return otherwise;
    }
  };
  return {
    get: (key) => memory.get(key) ?? attempt((kept) => kept.getItem(key), null),
    set(key, value) {
      if (attempt((kept) => (kept.setItem(key, value), true), false)) memory.delete(key);
      else memory.set(key, value);
    },
    remove(key) {
      memory.delete(key);
      attempt((kept) => kept.removeItem(key));
    },
    names: () => [...memory.keys(), ...attempt(Object.keys, [])],
  };
}

/** Until it is removed. */
export const local = guarded("localStorage");

/** Until the tab is closed. */
export const session = guarded("sessionStorage");

/** A BroadcastChannel. */
export function openChannel(name) {
  try {
    return new BroadcastChannel(name);
  } catch {
    return { postMessage() {}, close() {} };
  }
}
