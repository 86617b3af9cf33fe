// Four curves of the last two minutes, from counts that only grow: what has come between two snapshots.

import { $, element, row } from "/page/dom.js";

const WINDOW_S = 120;
const [WIDTH, HEIGHT] = [240, 60];
// Room for the line's own width.
const EDGE = 2;
const SVG = "http://www.w3.org/2000/svg";

const count = (value) => value.toFixed(value < 10 ? 1 : 0);
const whole = (value) => value.toFixed(0);
const duration = (seconds) => (seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`);

class Curve {
  /** Values further apart than `gap` seconds are not joined. */
  constructor(title, write, gap = 10) {
    this.title = title;
    this.write = write;
    this.gap = gap;
    this.points = [];
    this.value = element("strong", "-");
    this.top = element("span");
    const caption = element("figcaption", title), figures = element("div", undefined, "now");
    figures.append(this.value, this.top);
    caption.append(figures);
    this.svg = document.createElementNS(SVG, "svg");
    this.path = document.createElementNS(SVG, "path");
    for (const [name, value] of Object.entries({ viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" })) this.svg.setAttribute(name, value);
    this.path.setAttribute("vector-effect", "non-scaling-stroke");
    this.svg.append(this.path);
    this.root = element("figure", undefined, "curve");
    this.root.append(caption, this.svg);
    this.draw(0);
  }

  clear() {
    this.points = [];
  }

  /** A value at a time in seconds; null where there is none. `most`: what it can be at most, if that is known. */
  add(at, value, most) {
    if (value !== null) this.points.push({ at, value });
    this.points = this.points.filter((point) => point.at > at - WINDOW_S);
    this.draw(at, most);
  }

  draw(now, most) {
    const figures = this.figures();
    const top = most || Math.max(figures.most, 1e-6);
    let before = null, drawn = "";
    for (const { at, value } of this.points) {
      const x = (WIDTH - EDGE) * (1 - (now - at) / WINDOW_S), y = EDGE + (HEIGHT - 2 * EDGE) * (1 - Math.min(1, value / top));
      // A value alone is a dot: a line of no length with round ends.
      drawn += before !== null && at - before <= this.gap ? `L${x.toFixed(1)} ${y.toFixed(1)}` : `M${x.toFixed(1)} ${y.toFixed(1)}h0`;
      before = at;
    }
    this.path.setAttribute("d", drawn);
    const told = this.told(figures);
    this.value.textContent = told[0];
    this.top.textContent = this.points.length ? `top ${this.write(top)}` : "";
    this.svg.setAttribute("aria-label", `${this.title} in the last two minutes: now ${told[0]}, least ${told[1]}, mean ${told[2]}, most ${told[3]}`);
  }

  figures() {
    const values = this.points.map((point) => point.value);
    if (!values.length) return { now: null, least: null, mean: null, most: 0 };
    const sum = values.reduce((total, value) => total + value, 0);
    return { now: values.at(-1), least: Math.min(...values), mean: sum / values.length, most: Math.max(...values) };
  }

  /** Now, least, mean and most, as text. */
  told({ now, least, mean, most } = this.figures()) {
    return now === null ? ["-", "-", "-", "-"] : [now, least, mean, most].map(this.write);
  }
}

const curves = {
  rate: new Curve("Tokens per second", count),
  first: new Curve("Time to first token", duration, WINDOW_S),
  between: new Curve("Time between tokens", duration),
  blocks: new Curve("KV blocks in use", whole),
};
let last = null;
$("curves").replaceChildren(...Object.values(curves).map((curve) => curve.root));

/** The next snapshot, with `used` of `total` blocks held by somebody. */
export function showCurves(snapshot, used, total) {
  const at = snapshot.at_s;
  // Another server, or the same one started anew: its counts begin again.
  if (last && (at < last.at_s || snapshot.frontend_ids.join() !== last.frontend_ids.join())) {
    for (const curve of Object.values(curves)) curve.clear();
    last = null;
  }
  if (last && at === last.at_s) return;
  curves.rate.add(at, last && tokens(last, snapshot) / (at - last.at_s));
  curves.first.add(at, last && mean(last, snapshot, "first_token_s", "first_tokens"));
  curves.between.add(at, last && mean(last, snapshot, "between_tokens_s", "between_tokens"));
  curves.blocks.add(at, used, total);
  last = snapshot;
  $("figures").replaceChildren(...Object.values(curves).map((curve) => row("td", ["", "", "", "", ""], [curve.title, ...curve.told()])));
}

/** Tokens that came between two snapshots, of the workers that are in both. */
function tokens(before, after) {
  const known = new Map(before.workers.map((worker) => [worker.id, worker.tokens_sampled]));
  return after.workers.reduce((sum, worker) => sum + Math.max(0, worker.tokens_sampled - (known.get(worker.id) ?? Infinity)), 0);
}

function mean(before, after, sum, number) {
  const came = after[number] - before[number];
  return came > 0 ? Math.max(0, after[sum] - before[sum]) / came : null;
}
