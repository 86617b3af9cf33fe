// A worker's blocks as squares, those on its device apart from those in CPU memory. A pointer over one, or the arrow keys, tell who holds it.

import { element } from "/page/dom.js";
import { CPU_STATES, DEVICE_STATES, FREE, STATES, colour } from "/page/states.js";
import { showTiers } from "/page/tiers.js";

const GAP = 1;
const LARGEST = 14;
const SMALLEST = 3;
// Snapshots without a block in CPU memory in use, until its squares are folded away.
const EMPTY_SNAPSHOTS = 5;

/** By the ids of blocks, who holds them: on the device, and in CPU memory. */
function owners(worker) {
  const device = new Map(), cpu = new Map();
  for (const owner of worker.owners) {
    const name = owner.prefix_name ? `pinned prefix ${owner.prefix_name}` : `request ${owner.request_id}`;
    for (const [blocks, ids] of [[device, owner.block_ids], [cpu, owner.cpu_block_ids]]) {
      for (const id of ids) blocks.set(id, [...(blocks.get(id) ?? []), name]);
    }
  }
  return { device, cpu };
}

/** How many blocks are in each state. */
function totals(states) {
  const found = STATES.map(() => 0);
  for (const state of states) found[state] += 1;
  return found;
}

/** Those that somebody holds. */
export function inUse(states) {
  return totals(states).reduce((sum, count, state) => sum + (FREE.has(state) ? 0 : count), 0);
}

class Grid {
  /** `kind`: what one block is called; `usual`: the states that are told even where no block is in them. */
  constructor(kind, usual, tooltip) {
    this.kind = kind;
    this.usual = usual;
    this.tooltip = tooltip;
    this.states = new Uint8Array();
    this.owners = new Map();
    this.pointer = null;
    this.chosen = 0;
    this.legend = element("ul", undefined, "legend");
    this.canvas = element("canvas");
    for (const [name, value] of Object.entries({ role: "slider", tabindex: "0", "aria-valuemin": "0" })) this.canvas.setAttribute(name, value);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("focus", () => this.choose(this.chosen));
    this.canvas.addEventListener("blur", () => {
      this.hide();
      this.draw();
    });
    this.canvas.addEventListener("keydown", (event) => this.press(event));
  }

  show(states, owners) {
    this.states = states;
    this.owners = owners;
    this.canvas.hidden = states.length === 0;
    const counts = totals(states);
    const told = STATES.flatMap(({ name }, state) => (name && (counts[state] || this.usual.has(state)) ? [{ name, state, count: counts[state] }] : []));
    this.legend.replaceChildren(...told.map(({ name, state, count }) => {
      const entry = element("li", `${name} ${count}`);
      entry.dataset.state = name;
      entry.style.setProperty("--state", colour(state));
      return entry;
    }));
    this.canvas.setAttribute("aria-label", `${states.length} ${this.kind}s: ${told.map(({ name, count }) => `${count} ${name}`).join(", ")}`);
    this.canvas.setAttribute("aria-valuemax", Math.max(0, states.length - 1));
    this.chosen = Math.max(0, Math.min(this.chosen, states.length - 1));
    this.value();
    this.draw();
    // The block under a resting pointer may be another's by now.
    if (this.pointer) this.point(this.pointer);
    else if (document.activeElement === this.canvas) this.choose(this.chosen);
  }

  draw() {
    const width = this.canvas.clientWidth;
    // Folded away.
    if (!width || !this.states.length) return;
    const area = width * 260;
    this.size = Math.max(SMALLEST, Math.min(LARGEST, Math.floor(Math.sqrt(area / this.states.length)) - GAP));
    this.columns = Math.max(1, Math.floor(width / (this.size + GAP)));
    const rows = Math.ceil(this.states.length / this.columns);
    const scale = window.devicePixelRatio || 1;
    this.canvas.dataset.size = this.size;
    this.canvas.width = width * scale;
    this.canvas.height = rows * (this.size + GAP) * scale;
    this.canvas.style.height = `${rows * (this.size + GAP)}px`;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    this.states.forEach((state, id) => {
      context.fillStyle = colour(state);
      context.fillRect(...this.corner(id), this.size, this.size);
    });
    if (document.activeElement !== this.canvas) return;
    const [x, y] = this.corner(this.chosen);
    context.strokeStyle = getComputedStyle(this.canvas).color;
    context.lineWidth = 2;
    context.strokeRect(x + 1, y + 1, this.size - 2, this.size - 2);
  }

  corner(id) {
    return [(id % this.columns) * (this.size + GAP), Math.floor(id / this.columns) * (this.size + GAP)];
  }

  point(event) {
    this.pointer = event;
    if (!event) return this.hide();
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / (this.size + GAP));
    const id = Math.floor((event.clientY - box.top) / (this.size + GAP)) * this.columns + column;
    if (column >= this.columns || id < 0 || id >= this.states.length) return this.hide();
    this.tell(id, event.clientX, event.clientY);
  }

  /** With the keyboard: the tooltip is at the block itself. */
  choose(id) {
    if (!this.states.length || !this.columns) return;
    this.chosen = Math.max(0, Math.min(this.states.length - 1, id));
    this.value();
    this.draw();
    const box = this.canvas.getBoundingClientRect(), [x, y] = this.corner(this.chosen);
    this.tell(this.chosen, box.left + x, box.top + y);
  }

  press(event) {
    if (event.key === "Escape") return this.hide();
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns, Home: -this.chosen, End: this.states.length };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.choose(this.chosen + steps[event.key]);
  }

  value() {
    this.canvas.setAttribute("aria-valuenow", this.chosen);
    if (this.states.length) this.canvas.setAttribute("aria-valuetext", this.told(this.chosen));
  }

  told(id) {
    const holders = this.owners.get(id) ?? [];
    return `${this.kind} ${id}: ${STATES[this.states[id]].name}${holders.length ? `, ${holders.join(", ")}` : ""}`;
  }

  tell(id, x, y) {
    this.tooltip.textContent = this.told(id);
    this.tooltip.hidden = false;
    this.tooltip.style.left = `${Math.max(8, Math.min(x + 14, document.documentElement.clientWidth - this.tooltip.offsetWidth - 8))}px`;
    this.tooltip.style.top = `${y + 18}px`;
  }

  hide() {
    this.tooltip.hidden = true;
  }
}

export class BlockMap {
  constructor(tooltip) {
    this.root = element("section", undefined, "worker");
    this.title = element("h4");
    this.device = new Grid("KV block", DEVICE_STATES, tooltip);
    this.cpu = new Grid("CPU block", CPU_STATES, tooltip);
    const device = element("figure");
    this.deviceCaption = element("figcaption");
    device.append(this.deviceCaption, this.device.legend, this.device.canvas);
    this.fold = element("details", undefined, "cpu");
    this.cpuCaption = element("summary");
    this.fold.append(this.cpuCaption, this.cpu.legend, this.cpu.canvas);
    this.tiers = element("ul", undefined, "tiers");
    this.root.append(this.title, this.tiers, device, this.fold);
    this.empty = EMPTY_SNAPSHOTS;
    this.fold.addEventListener("toggle", () => this.cpu.draw());
    // From then on it is as the reader wants it.
    this.cpuCaption.addEventListener("click", () => { this.isReaders = true; });
  }

  show(worker) {
    const held = owners(worker), swapped = inUse(worker.cpuStates);
    this.root.dataset.worker = worker.id;
    this.title.textContent = `${worker.id}: ${worker.device}, ${worker.token_rate.toFixed(0)} tokens/s when busy` + (worker.moved_in ? `, ${worker.moved_in} requests came from other workers` : "");
    showTiers(this.tiers, worker.tiers);
    this.deviceCaption.textContent = `KV blocks on the device: ${inUse(worker.states)} of ${worker.states.length} in use` + (worker.block_size ? `, ${worker.block_size} tokens each` : "");
    this.cpuCaption.textContent = worker.cpuStates.length ? `Blocks in CPU memory, for requests swapped out and what is cached: ${swapped} of ${worker.cpuStates.length} in use` : "No blocks in CPU memory: nothing is swapped out to it";
    this.empty = swapped ? 0 : this.empty + 1;
    if (!this.isReaders) this.fold.open = this.empty < EMPTY_SNAPSHOTS;
    this.device.show(worker.states, held.device);
    this.cpu.show(worker.cpuStates, held.cpu);
  }
}
