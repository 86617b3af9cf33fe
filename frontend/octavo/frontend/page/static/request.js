// The request that the form asks for, and the curl command that sends the same.

import { $ } from "/page/dom.js";
import { messages } from "/page/conversation.js";
import { hasKey } from "/page/http.js";

// What a terminal would act on or hide: control characters that JSON leaves as they are, and those that turn the reading direction.
const INVISIBLE = /[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;

export function isChat() {
  return document.querySelector("input[name=mode]:checked").value === "chat";
}

/** Path and body. An empty field leaves the choice to the server. */
export function request(model) {
  const body = { model, stream: true, stream_options: { include_usage: true } };
  for (const [id, name] of [["tokens", "max_tokens"], ["temperature", "temperature"], ["answers", "n"]]) {
    if ($(id).value !== "") body[name] = Number($(id).value);
  }
  if (body.n > 1) body.temperature ??= 1;
  if (isChat()) return ["/v1/chat/completions", { ...body, messages: messages($("prompt").value) }];
  return ["/v1/completions", { ...body, prompt: $("prompt").value }];
}

/** A command for a POSIX shell. The key stays here: the command takes it from the environment. */
export function curl(path, body) {
  const escaped = JSON.stringify(body).replace(INVISIBLE, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);
  const lines = ["curl -N", quote(location.origin + path), "-H 'content-type: application/json'"];
  if (hasKey()) lines.push('-H "authorization: Bearer $OCTAVO_API_KEY"');
  return [...lines, `-d ${quote(escaped)}`].join(" \\\n  ");
}

/** As one word to the shell, whatever is in it. */
function quote(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
