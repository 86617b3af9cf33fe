// The requests that this page has under way, by their ids: all that a tenant's page knows of.

const running = new Map();
const listeners = [];

/** An id that nobody has yet. `crypto.randomUUID` is not there where the page came without TLS. */
export function freshId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Enters a request; what is returned takes it out again. */
export function enter(id) {
  running.set(id, performance.now());
  tell();
  return () => {
    running.delete(id);
    tell();
  };
}

export function isOwn(id) {
  return running.has(id);
}

/** As the live view's requests are, as far as this page knows. */
export function ownRequests() {
  return [...running].map(([id, since]) => ({ request_id: id, frontend_id: "", state: "sent by this page", age_s: (performance.now() - since) / 1000 }));
}

export function onOwnChange(again) {
  listeners.push(again);
}

function tell() {
  for (const again of listeners) again();
}
