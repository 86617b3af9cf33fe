// What the scheduler says of one request, in sentences.

import { TIERS } from "/page/tiers.js";

const OBSTACLES = {
  token_budget: (needed, available) => `needs ${needed} tokens of the next step, which has ${available} left`,
  sequence_slots: (needed, available) => `needs ${needed} sequence slots, ${available} are free`,
  kv_blocks: (needed, available) => `needs ${needed} KV blocks, ${available} are free`,
  swapped: (_, available) => `requests swapped out come back first: ${available}`,
  preemption: (needed, available) => `what runs needs ${needed} KV blocks and ${available} are free, so it preempts first`,
  capacity: (needed, available) => `may grow to ${needed} KV blocks, there are ${available} in all`,
  delay: (needed, available) => `prompts gather for ${needed} ms, ${available} have passed`,
  no_worker: () => "there is no worker that takes it",
  disk: (needed) => `the worker's disk is reading ${needed} KV blocks of it`,
  move: (needed) => `the worker copies ${needed} KV blocks of it, to go on with them`,
  prefix_copy: (needed) => `the worker copies ${needed} KV blocks that it begins with from another one`,
  isolation: (_, available) => `requests over which workers may have died are computed alone first: ${available}`,
};

const MISSES = {
  short: () => "the rest fills no block before the last token, which is always computed",
  off: () => "the scheduler runs without prefix caching",
  bypassed: () => "log probabilities of its prompt are wanted, so all of it is computed",
  evicted: ({ position, evicted_s }) => `the block with token ${position} made way for others ${evicted_s.toFixed(1)} s before`,
  other_worker: ({ elsewhere }) => `more of it was computed by another worker, ${elsewhere}`,
  not_kept: () => "more of it was computed there, but is gone, or was not ready",
  differs: ({ position, token, other_token }) => `token ${position} is ${token}; the longest beginning known has ${other_token} there`,
  ends: ({ position }) => `the longest beginning known ends before token ${position}`,
  other_salt: () => "its tenant has sent more of it, behind another cache salt",
  unknown: () => "more of it was never computed, as far as is remembered",
};

/** Where its beginning was found computed, and why not more of it; nothing before its first admission. */
function found(cache) {
  if (!cache) return [];
  const places = Object.entries(TIERS).map(([tier, where]) => [cache[`${tier}_tokens`], where]);
  if (cache.replica_tokens) places.push([cache.replica_tokens, `on ${cache.source}`]);
  const total = places.reduce((sum, [count]) => sum + count, 0);
  return [
    `found computed: ${total} of ${cache.tokens} tokens: ${places.map(([count, where]) => `${count} ${where}`).join(", ")}; ${cache.worker_id}`,
    MISSES[cache.reason]?.(cache) ?? `not more: ${cache.reason}`,
  ];
}

export function sentences(told) {
  if (told.state === "ended") return [`ended, ${told.age_s.toFixed(1)} s after it was admitted`, ...found(told.cache)];
  return [
    `${told.state}${told.worker_id ? ` on ${told.worker_id}` : ""}${told.moves_to ? `, on its way to ${told.moves_to}` : ""}, ${told.age_s.toFixed(1)} s after it came`,
    `${told.prompt_tokens} prompt tokens, ${told.output_tokens} generated in ${told.sequences} sequences, ${told.computed_tokens} computed; preempted ${told.preemptions} times, ${told.swaps} of them swapped out`,
    ...found(told.cache),
    ...(told.state === "running" ? running(told) : waiting(told)),
  ];
}

function running(told) {
  if (told.steps) return [`steps under way with it: ${told.steps}; tokens chosen in them: ${told.tokens_in_flight}`];
  return ["no step with it is under way", ...obstacles(told)];
}

function waiting(told) {
  const ahead = told.queue_position - 1, lines = obstacles(told);
  if (!lines.length) lines.push(`there is room for it${ahead > 0 ? " once its turn comes" : ": it joins the next step"}`);
  if (ahead > 0) lines.unshift(`place ${told.queue_position} in the queue${behind(told.ahead, ahead)}`);
  return lines;
}

function behind(ids, ahead) {
  if (!ids.length) return "";
  const some = ids.slice(0, 5);
  return `, behind ${some.join(", ")}${ahead > some.length ? ` and ${ahead - some.length} more` : ""}`;
}

function obstacles(told) {
  return told.obstacles.map(({ worker_id, kind, needed, available }) => (worker_id ? `${worker_id}: ` : "") + (OBSTACLES[kind]?.(needed, available) ?? `waits for ${kind}`));
}
