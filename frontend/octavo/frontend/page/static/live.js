// The live view: counts, curves, requests, and a map of every worker's blocks, as the scheduler tells them.

import { BlockMap, inUse } from "/page/blocks.js";
import { showCurves } from "/page/curves.js";
import { $, element } from "/page/dom.js";
import { events, explain, headers, onKeyChange } from "/page/http.js";
import { onOwnChange, ownRequests } from "/page/own.js";
import { showRequests } from "/page/requests.js";

const RETRY_MS = 3000;
const maps = new Map();
let connection = null;
// Whether snapshots are not for this page's key: then it shows what it knows itself.
let isShut = false;

function bytes(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

/** `stale`: what is shown is not how it is now. */
function say(text, stale) {
  $("live-status").textContent = text;
  $("live").classList.toggle("stale", stale);
}

function showCounts(load) {
  const counts = { waiting: load.waiting, running: load.running, "swapped out": load.swapped, preemptions: load.preemptions, moved: load.moved, frontends: load.frontends, workers: load.workers.length };
  $("counts").replaceChildren(...Object.entries(counts).map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", value));
    return pair;
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

/** KV blocks of each request, by its id, on all workers. */
function blocksOf(workers) {
  const found = new Map();
  for (const { owners } of workers) for (const owner of owners) found.set(owner.request_id, (found.get(owner.request_id) ?? 0) + owner.block_ids.length);
  return found;
}

function show(snapshot) {
  const workers = snapshot.workers.map((worker) => ({ ...worker, states: bytes(worker.states), cpuStates: bytes(worker.cpu_states) }));
  say("as the scheduler sees it", false);
  showCounts(snapshot.load);
  showCurves(snapshot, workers.reduce((sum, worker) => sum + inUse(worker.states), 0), workers.reduce((sum, worker) => sum + worker.states.length, 0));
  showRequests(snapshot.requests, snapshot.frontend_ids, blocksOf(workers));
  $("nothing").textContent = "No request is held.";
  showWorkers(workers);
}

function forget() {
  $("counts").replaceChildren();
  showWorkers([]);
}

function showOwn() {
  if (!isShut) return;
  showRequests(ownRequests(), []);
  $("nothing").textContent = "Of this page no request runs; what others do is not shown.";
}

async function follow(signal) {
  const response = await fetch("/live", { headers: headers(), signal });
  if (!response.ok) throw Object.assign(new Error(await explain(response)), { final: response.status === 401 });
  isShut = false;
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
      isShut ||= error.final || !maps.size;
      // What was shown was for another key.
      if (error.final) forget();
      showOwn();
      // Until another key is given.
      if (error.final) return;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

onKeyChange(connect);
onOwnChange(showOwn);
connect();
