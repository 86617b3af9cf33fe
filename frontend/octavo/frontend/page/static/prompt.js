// The prompt box: one request at a time, streamed.

import { events, explain, headers, onKeyChange } from "/page/http.js";

const $ = (id) => document.getElementById(id);
let running = null;
let model = "";

async function nameModel() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) {
    $("model").textContent = await explain(response);
    return;
  }
  model = (await response.json()).data[0].id;
  $("model").textContent = model;
}

function request() {
  const mode = document.querySelector("input[name=mode]:checked").value;
  const body = { model, stream: true, stream_options: { include_usage: true }, n: Number($("answers").value), max_tokens: Number($("tokens").value) };
  if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
  else if (body.n > 1) body.temperature = 1;
  if (mode === "chat") return ["/v1/chat/completions", { ...body, messages: [{ role: "user", content: $("prompt").value }] }];
  return ["/v1/completions", { ...body, prompt: $("prompt").value }];
}

function answers(count) {
  $("output").replaceChildren(...Array.from({ length: count }, () => {
    const answer = document.createElement("div");
    answer.className = "answer";
    return answer;
  }));
  return [...$("output").children];
}

async function send() {
  const [path, body] = request();
  const places = answers(body.n);
  const began = performance.now();
  let first = null;
  running = new AbortController();
  const response = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify(body),
    signal: running.signal,
  });
  if (!response.ok) throw new Error(await explain(response));
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    for (const choice of event.choices) {
      const text = choice.delta?.content ?? choice.text ?? "";
      if (text && first === null) {
        first = performance.now();
        $("status").textContent = "streaming";
      }
      places[choice.index].append(text);
    }
    if (event.usage) report(event.usage, began, first);
  }
}

function report(usage, began, first) {
  const now = performance.now();
  const seconds = (now - (first ?? now)) / 1000;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  $("status").textContent = `${usage.prompt_tokens} prompt tokens (${cached} cached), ${usage.completion_tokens} generated; ` +
    `first after ${Math.round((first ?? now) - began)} ms` +
    (seconds > 0 ? `, then ${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s` : "");
}

function busy(is) {
  $("send").disabled = is;
  $("stop").disabled = !is;
}

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  busy(true);
  $("status").className = "quiet";
  $("status").textContent = "waiting";
  try {
    await send();
  } catch (error) {
    $("status").textContent = error.name === "AbortError" ? "stopped" : error.message;
    if (error.name !== "AbortError") $("status").className = "error";
  } finally {
    busy(false);
  }
});
$("answers").addEventListener("input", () => { $("temperature").placeholder = Number($("answers").value) > 1 ? "1" : "model's"; });
$("stop").addEventListener("click", () => running?.abort());
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
onKeyChange(nameModel);
nameModel();
