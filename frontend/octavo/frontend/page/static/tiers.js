// The tiers of a worker's prefix cache: how full each is, what was found there, and where its blocks went.

import { element } from "/page/dom.js";

// By the scheduler's names for them.
export const TIERS = {
  device: "on the device",
  cpu: "in CPU memory",
  disk: "on the disk",
};

function told({ tier, blocks, capacity, hits, hit_tokens, evicted_blocks, missed_blocks, moved, place }) {
  const parts = [`${blocks} of ${capacity} blocks cached ${TIERS[tier] ?? tier}`, `found there ${hit_tokens} tokens of ${hits} requests`];
  if (evicted_blocks) parts.push(`made way ${evicted_blocks}`);
  if (missed_blocks) parts.push(`asked for in vain ${missed_blocks}`);
  parts.push(...Object.entries(moved).filter(([, count]) => count).map(([to, count]) => `moved to ${to} ${count}`));
  return parts.join("; ") + (place ? ` (${place})` : "");
}

/** A line for each tier, with a bar of what is cached there. */
export function showTiers(list, tiers) {
  while (list.children.length > tiers.length) list.lastChild.remove();
  while (list.children.length < tiers.length) {
    const made = element("li");
    made.append(element("meter"), element("span"));
    list.append(made);
  }
  tiers.forEach((tier, index) => {
    const [bar, text] = list.children[index].children, line = told(tier);
    list.children[index].dataset.tier = tier.tier;
    bar.max = Math.max(tier.capacity, 1);
    bar.value = tier.blocks;
    bar.setAttribute("aria-label", `cached ${TIERS[tier.tier] ?? tier.tier}`);
    if (text.textContent !== line) text.textContent = line;
  });
}
