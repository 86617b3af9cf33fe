// The table of requests, grouped by state; each can be explained and aborted. A row stays the same element for as long as its request is
// there, so that the focus stays where it is while figures change.

import { $, element, row } from "/page/dom.js";
import { call } from "/page/http.js";
import { isOwn } from "/page/own.js";
import { sentences } from "/page/explanation.js";

const GROUPS = ["running", "waiting", "swapped"];
const COLUMNS = ["id", "tenant mid", "worker mid", "prompt mid", "computed more", "output", "seqs more", "preempted more", "blocks mid", "age", "deeds"];
// Of a state; others are counted.
const MOST_ROWS = 100;
const REFRESH_MS = 1000;
const rows = new Map();
const groups = new Map();
let open = null;
let frontends = [];

const keyOf = (request) => `${request.frontend_id}/${request.request_id}`;

/** What is held, whose requests are this server's to abort (`ids` of frontends), and how many blocks each has. */
export function showRequests(requests, ids, blocks = new Map()) {
  frontends = ids;
  const focused = $("requests").contains(document.activeElement) ? document.activeElement : null;
  const byState = new Map(GROUPS.map((state) => [state, []]));
  for (const request of requests) byState.set(request.state, [...(byState.get(request.state) ?? []), request]);
  const shown = new Map([...byState].map(([state, held]) => [state, held.slice(0, MOST_ROWS)]));
  const keys = new Set([...shown.values()].flat().map(keyOf));
  for (const [key, made] of rows) if (!keys.has(key)) forget(key, made);
  for (const [state, held] of byState) {
    fill(groupOf(state), state, held.length, shown.get(state).map((request) => rowOf(request, blocks.get(request.request_id))));
  }
  for (const [state, body] of groups) if (!byState.has(state)) body.hidden = true;
  $("nothing").hidden = requests.length > 0;
  if (focused) keepFocus(focused);
}

/** A body of the table, with the state above its rows. */
function groupOf(state) {
  if (!groups.has(state)) {
    const body = element("tbody"), head = element("tr", undefined, "group"), title = element("th");
    title.colSpan = COLUMNS.length;
    title.scope = "rowgroup";
    head.append(title);
    body.append(head);
    body.dataset.state = state;
    $("requests").append(body);
    groups.set(state, body);
  }
  return groups.get(state);
}

function fill(body, state, count, found) {
  body.hidden = count === 0;
  const more = count > found.length ? `, the first ${found.length} are shown` : "";
  body.rows[0].cells[0].textContent = `${state} (${count}${more})`;
  const wanted = found.flatMap((made) => (open?.of === made ? [made, open.row] : [made]));
  // Only what is out of place is moved: moving takes the focus away.
  wanted.forEach((made, index) => {
    if (body.rows[index + 1] !== made) body.insertBefore(made, body.rows[index + 1] ?? null);
  });
}

function rowOf(request, blocks) {
  const key = keyOf(request);
  if (!rows.has(key)) rows.set(key, makeRow(request));
  const made = rows.get(key);
  const texts = [null, request.tenant || "-", request.moves_to ? `${request.worker_id} to ${request.moves_to}` : request.worker_id || "-", request.prompt_tokens, request.computed_tokens, request.output_tokens, request.sequences, request.preemptions, blocks ?? "-", `${request.age_s.toFixed(1)} s`];
  texts.forEach((text, index) => {
    if (index) made.cells[index].textContent = text ?? "-";
  });
  return made;
}

function makeRow(request) {
  const made = row("td", COLUMNS, []);
  const name = element("th", request.request_id, "id");
  name.scope = "row";
  name.title = request.request_id;
  made.cells[0].replaceWith(name);
  made.dataset.request = request.request_id;
  const explain = button("Explain", request, () => toggle(made, request));
  const abort = button("Abort", request, () => end(request));
  explain.setAttribute("aria-expanded", "false");
  if (request.frontend_id && !frontends.includes(request.frontend_id)) {
    abort.disabled = true;
    abort.title = "another frontend holds it, and can abort it";
  }
  made.cells[COLUMNS.length - 1].append(explain, abort);
  return made;
}

function button(text, request, act) {
  const made = element("button", text, "small");
  made.type = "button";
  made.setAttribute("aria-label", `${text} request ${request.request_id}`);
  made.addEventListener("click", act);
  return made;
}

function forget(key, made) {
  if (open?.of === made) close();
  made.remove();
  rows.delete(key);
}

/** After rows were moved, or have gone with what had the focus. */
function keepFocus(focused) {
  if (document.activeElement === focused) return;
  (focused.isConnected ? focused : $("table")).focus();
  if (!focused.isConnected) say("the request that was chosen has ended");
}

function say(text) {
  $("deed").textContent = text;
}

// As the scheduler lists them; what this page has sent itself needs no frontend's name.
function path(request) {
  const frontend = request.frontend_id ? `?frontend=${encodeURIComponent(request.frontend_id)}` : "";
  return `/requests/${encodeURIComponent(request.request_id)}${frontend}`;
}

async function end(request) {
  if (!isOwn(request.request_id) && !confirm(`Abort request ${request.request_id}? Its client is told that it was aborted.`)) return;
  try {
    await call("DELETE", path(request));
    say(`request ${request.request_id} is aborted`);
  } catch (error) {
    say(error.message);
  }
}

function toggle(made, request) {
  const again = open?.of === made;
  close();
  if (again) return;
  const told = element("tr", undefined, "told"), cell = element("td", "asking the scheduler");
  cell.colSpan = COLUMNS.length;
  told.append(cell);
  made.after(told);
  made.querySelector("button").setAttribute("aria-expanded", "true");
  open = { of: made, row: told };
  refresh(open, request, cell);
}

/** Asks again and again while it is open. */
async function refresh(mine, request, cell) {
  while (open === mine) {
    let lines;
    try {
      lines = (await call("GET", path(request))).explanations.flatMap(sentences);
    } catch (error) {
      lines = [error.message];
    }
    cell.replaceChildren(...lines.map((line) => element("div", line)));
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
  }
}

function close() {
  if (!open) return;
  open.of.querySelector("button").setAttribute("aria-expanded", "false");
  open.row.remove();
  open = null;
}

/** Up, Down, Home and End go from a button to the same one of another row. */
$("requests").addEventListener("keydown", (event) => {
  const at = event.target.closest?.("button");
  if (!at) return;
  const place = [...at.parentNode.children].indexOf(at);
  const same = [...$("requests").querySelectorAll(`button:nth-child(${place + 1}):enabled`)];
  const to = { ArrowUp: same.indexOf(at) - 1, ArrowDown: same.indexOf(at) + 1, Home: 0, End: same.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  same[to]?.focus();
});
