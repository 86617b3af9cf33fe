// Calls of this server's API, with the key that the page holds, and reading its event streams.

const keyInput = document.getElementById("key");
keyInput.value = sessionStorage.getItem("octavo-key") ?? "";
keyInput.addEventListener("change", () => sessionStorage.setItem("octavo-key", keyInput.value));

export function hasKey() {
  return keyInput.value !== "";
}

export function headers() {
  return hasKey() ? { authorization: `Bearer ${keyInput.value}` } : {};
}

/** Runs `again` whenever another key is given. */
export function onKeyChange(again) {
  keyInput.addEventListener("change", again);
}

/** What went wrong, as the server says it. */
export async function explain(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

/** The answer to a call without a body, as parsed JSON. Throws what the server says is wrong, with its status. */
export async function call(method, path) {
  const response = await fetch(path, { method, headers: headers() });
  if (!response.ok) throw Object.assign(new Error(await explain(response)), { status: response.status });
  return response.json();
}

/** The data of every event of a stream, as parsed JSON, until it ends or says [DONE]. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
