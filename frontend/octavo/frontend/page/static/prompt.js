// The conversation's form: sends one request at a time, and shows its answer as it comes.

import { $ } from "/page/dom.js";
import { Turn, clear } from "/page/conversation.js";
import { call, events, explain, hasKey, headers, onKeyChange } from "/page/http.js";
import { enter, freshId } from "/page/own.js";
import { curl, isChat, request } from "/page/request.js";

let running = null;
let model = "";

async function nameModel() {
  try {
    model = (await call("GET", "/v1/models")).data[0].id;
    $("model").textContent = model;
  } catch (error) {
    $("model").textContent = error.message;
  }
  showCurl();
}

function say(text, isError = false) {
  $("status").className = isError ? "error" : "quiet";
  $("status").textContent = text;
}

async function answer(path, body, turn) {
  const began = performance.now();
  let first = null;
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
        say("streaming");
      }
      turn.append(choice.index, text);
      if (choice.finish_reason === "length") turn.note(choice.index, "(ends at the token limit)");
    }
    if (event.usage) report(event.usage, began, first);
  }
}

function report(usage, began, first) {
  const now = performance.now();
  const seconds = (now - (first ?? now)) / 1000;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  say(`${usage.prompt_tokens} prompt tokens (${cached} cached), ${usage.completion_tokens} generated; ` +
    `first after ${Math.round((first ?? now) - began)} ms` +
    (seconds > 0 ? `, then ${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s` : ""));
}

async function send() {
  const [path, body] = request(model);
  const content = $("prompt").value, id = freshId();
  const turn = new Turn(content, body.n ?? 1, isChat(), model);
  const mine = (running = new AbortController());
  const leave = enter(id);
  busy(true);
  say("waiting");
  $("prompt").value = "";
  try {
    await answer(path, { ...body, request_id: id }, turn);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    say(isStopped ? "stopped" : error.message, !isStopped);
    for (const index of turn.answers.keys()) turn.note(index, isStopped ? "(stopped)" : "(broken off)");
  }
  leave();
  // Of a conversation that has been left nothing is kept.
  if (running === mine) {
    if (!turn.end() && !$("prompt").value) $("prompt").value = content;
    running = null;
    busy(false);
  }
}

function startAnew() {
  running?.abort();
  running = null;
  clear();
  busy(false);
  say("");
  showCurl();
  $("prompt").focus();
}

function busy(is) {
  const [from, to] = is ? [$("send"), $("stop")] : [$("stop"), $("send")];
  to.disabled = false;
  // What cannot be used must not keep the focus.
  if (document.activeElement === from) to.focus();
  from.disabled = true;
  showCurl();
}

function showCurl() {
  if ($("curl").open) $("command").textContent = curl(...request(model));
  $("copied").textContent = "";
}

async function copy() {
  const command = $("command");
  try {
    await navigator.clipboard.writeText(command.textContent);
    $("copied").textContent = "copied";
  } catch {
    // Pages that came without TLS have no clipboard.
    getSelection().selectAllChildren(command);
    $("copied").textContent = document.execCommand("copy") ? "copied" : "selected: copy it with the keyboard";
  }
  if (hasKey()) $("copied").textContent += "; put your key into OCTAVO_API_KEY";
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) send();
});
$("form").addEventListener("input", () => {
  $("temperature").placeholder = Number($("answers").value) > 1 ? "1" : "model's";
  $("system").disabled = !isChat();
  showCurl();
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", startAnew);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
$("curl").addEventListener("toggle", showCurl);
$("copy").addEventListener("click", copy);
onKeyChange(nameModel);
nameModel();
