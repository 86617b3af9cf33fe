// What was said: the turns as they are shown, and the history that goes along with the next one.

import { $, element } from "/page/dom.js";

let history = [];

/** The messages of a chat that goes on with `content`. */
export function messages(content) {
  const system = $("system").value.trim() ? [{ role: "system", content: $("system").value }] : [];
  return [...system, ...history, { role: "user", content }];
}

/** Forgets all turns. */
export function clear() {
  history = [];
  $("turns").replaceChildren();
  $("turns").removeAttribute("aria-busy");
  $("turns").hidden = true;
}

/** A turn that begins: the prompt, and room for `count` answers, which take text as it comes. */
export class Turn {
  constructor(content, count, isChat, model) {
    this.content = content;
    this.isChat = isChat;
    this.prompt = message("user", isChat ? "You" : "Text", content);
    this.answers = Array.from({ length: count }, (_, index) => message("assistant", count > 1 ? `${model}, answer ${index + 1}` : model, ""));
    $("turns").hidden = false;
    $("turns").setAttribute("aria-busy", "true");
    $("turns").append(this.prompt, ...this.answers);
    follow(true);
  }

  get text() {
    return this.answers[0].lastChild.textContent;
  }

  append(index, text) {
    const near = isAtEnd();
    this.answers[index].lastChild.append(text);
    follow(near);
  }

  /** Says of an answer why it is not a whole one. */
  note(index, text) {
    this.answers[index].firstChild.append(element("span", ` ${text}`, "quiet"));
  }

  /** It is over. With an answer, whole or not, it becomes history; without one it never was. Returns which. */
  end() {
    $("turns").removeAttribute("aria-busy");
    const some = this.answers.some((answer) => answer.lastChild.textContent);
    if (!some) {
      for (const part of [this.prompt, ...this.answers]) part.remove();
      $("turns").hidden = !$("turns").children.length;
    } else if (this.isChat) {
      history.push({ role: "user", content: this.content }, { role: "assistant", content: this.text });
      if (this.answers.length > 1) this.note(0, "(the conversation goes on with this one)");
    }
    return some;
  }
}

function message(role, who, text) {
  const made = element("div", undefined, `turn ${role}`);
  made.append(element("div", who, "who"), element("div", text, role === "user" ? "said" : "answer"));
  return made;
}

function isAtEnd() {
  const turns = $("turns");
  return turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40;
}

function follow(is) {
  if (is) $("turns").scrollTop = $("turns").scrollHeight;
}
