// A worker's blocks as squares: device blocks first, then those in CPU memory. Hovering one tells who holds it.

import { STATES, colour } from "/page/states.js";

const GAP = 1;
const LARGEST = 14;
const SMALLEST = 3;

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

class Grid {
  constructor(label, tooltip) {
    this.label = label;
    this.tooltip = tooltip;
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.states = new Uint8Array();
    this.owners = new Map();
    this.pointer = null;
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("mouseleave", () => this.point(null));
  }

  show(states, owners) {
    this.states = states;
    this.owners = owners;
    this.canvas.hidden = states.length === 0;
    this.canvas.setAttribute("aria-label", `${states.length} ${this.label}`);
    this.draw();
    // The block under a resting pointer may be another's by now.
    if (this.pointer) this.point(this.pointer);
  }

  draw() {
    const width = this.canvas.clientWidth || 600;
    const area = width * 260;
    this.size = Math.max(SMALLEST, Math.min(LARGEST, Math.floor(Math.sqrt(area / Math.max(1, this.states.length))) - GAP));
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
      context.fillRect((id % this.columns) * (this.size + GAP), Math.floor(id / this.columns) * (this.size + GAP), this.size, this.size);
    });
  }

  point(event) {
    this.pointer = event;
    this.tooltip.hidden = !event;
    if (event) this.tell(event);
  }

  tell(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / (this.size + GAP));
    const id = Math.floor((event.clientY - box.top) / (this.size + GAP)) * this.columns + column;
    const inside = column < this.columns && id >= 0 && id < this.states.length;
    this.tooltip.hidden = !inside;
    if (!inside) return;
    const holders = this.owners.get(id) ?? [];
    this.tooltip.textContent = `${this.label.replace(/s$/, "")} ${id}: ${STATES[this.states[id]].name}` + (holders.length ? `, ${holders.join(", ")}` : "");
    this.tooltip.style.left = `${Math.max(8, Math.min(event.clientX + 14, window.innerWidth - this.tooltip.offsetWidth - 8))}px`;
    this.tooltip.style.top = `${event.clientY + 14}px`;
  }
}

export class BlockMap {
  constructor(tooltip) {
    this.root = document.createElement("div");
    this.root.className = "worker";
    this.title = document.createElement("div");
    this.device = new Grid("blocks", tooltip);
    this.cpu = new Grid("CPU blocks", tooltip);
    this.root.append(this.title, this.device.canvas, this.cpu.canvas);
  }

  show(worker) {
    const held = owners(worker);
    this.root.dataset.worker = worker.id;
    this.title.textContent = `${worker.id}: ${worker.device}, ${worker.states.length} blocks` + (worker.cpuStates.length ? ` and ${worker.cpuStates.length} in CPU memory` : "") + `, ${worker.token_rate.toFixed(0)} tokens/s`;
    this.device.show(worker.states, held.device);
    this.cpu.show(worker.cpuStates, held.cpu);
  }
}
