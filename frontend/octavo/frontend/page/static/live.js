// The live view: counts, requests, and a map of every worker's blocks, as the scheduler tells them.

import { events, explain, headers, onKeyChange } from "/page/http.js";
import { BlockMap } from "/page/blocks.js";
import { STATES, colour } from "/page/states.js";

const $ = (id) => document.getElementById(id);
const RETRY_MS = 3000;
const maps = new Map();
let connection = null;

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function bytes(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

/** `stale`: what is shown is not how it is now. */
function say(text, stale) {
  $("live-status").textContent = text;
  $("live").classList.toggle("stale", stale);
}

function showCounts(load) {
  const counts = { waiting: load.waiting, running: load.running, "swapped out": load.swapped, preemptions: load.preemptions, frontends: load.frontends, workers: load.workers.length };
  $("counts").replaceChildren(...Object.entries(counts).map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", value));
    return pair;
  }));
}

function showLegend(workers) {
  const totals = STATES.map(() => 0);
  for (const worker of workers) for (const state of [...worker.states, ...worker.cpuStates]) totals[state] += 1;
  $("legend").replaceChildren(...STATES.flatMap(({ name }, state) => {
    if (!name) return [];
    const entry = element("span", `${name} ${totals[state]}`);
    entry.dataset.state = name;
    entry.style.setProperty("--state", colour(state));
    return [entry];
  }));
}

function showWorkers(workers) {
  for (const [id, map] of maps) {
    if (workers.some((worker) => worker.id === id)) continue;
    map.root.remove();
    maps.delete(id);
  }
  for (const worker of workers) {
    if (!maps.has(worker.id)) {
      maps.set(worker.id, new BlockMap($("tooltip")));
      $("workers").append(maps.get(worker.id).root);
    }
    maps.get(worker.id).show(worker);
  }
}

function showRequests(requests) {
  $("requests").replaceChildren(...requests.map((request) => {
    const row = element("tr");
    row.dataset.request = request.request_id;
    const cells = [request.request_id, request.state, request.tenant || "-", request.worker_id || "-", request.prompt_tokens, request.computed_tokens, request.output_tokens, request.sequences, request.preemptions, `${request.age_s.toFixed(1)} s`];
    row.append(...cells.map((cell) => element("td", cell)));
    row.firstChild.title = request.request_id;
    return row;
  }));
}

function show(snapshot) {
  const workers = snapshot.workers.map((worker) => ({ ...worker, states: bytes(worker.states), cpuStates: bytes(worker.cpu_states) }));
  say("as the scheduler sees it", false);
  showCounts(snapshot.load);
  showLegend(workers);
  showWorkers(workers);
  showRequests(snapshot.requests);
}

async function follow(signal) {
  const response = await fetch("/live", { headers: headers(), signal });
  if (!response.ok) throw Object.assign(new Error(await explain(response)), { final: response.status === 401 });
  for await (const snapshot of events(response)) {
    if (snapshot.error) throw new Error(snapshot.error.message);
    show(snapshot);
  }
  throw new Error("the stream ended");
}

async function connect() {
  connection?.abort();
  const mine = (connection = new AbortController());
  while (!mine.signal.aborted) {
    try {
      await follow(mine.signal);
    } catch (error) {
      if (mine.signal.aborted) return;
      say(error.message, true);
      // Until another key is given.
      if (error.final) return;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

onKeyChange(connect);
connect();
