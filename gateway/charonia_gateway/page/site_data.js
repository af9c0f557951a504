// The browser's storage for this site, and messages between its tabs. If storage is blocked or full, values last until
// the page is closed. If messages are blocked, the tab works alone.

function guarded(name) {
  const memory = new Map(); // values that could not be stored; they override stored values
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

/** Lasts until it is removed. */
export const local = guarded("localStorage");

/** Lasts until the tab is closed. */
export const session = guarded("sessionStorage");

/** A BroadcastChannel. */
export function openChannel(name) {
  try {
    return new BroadcastChannel(name);
  } catch {
    return { postMessage() {}, close() {} };
  }
}
