// What a block can be, by the number of its BlockState, and its colour on light and on dark paper.

export const STATES = [
  { name: "", light: "", dark: "" },
  { name: "free", light: "#e6e2d8", dark: "#2f363c" },
  { name: "cached", light: "#8fb8de", dark: "#4f7ba3" },
  { name: "private", light: "#3f8f60", dark: "#4fae77" },
  { name: "shared", light: "#e0a33b", dark: "#e8b04d" },
  { name: "pinned", light: "#8d63b0", dark: "#ab82cf" },
  { name: "parked", light: "#8b9298", dark: "#7d858c" },
  { name: "swapped", light: "#b4574a", dark: "#d2705f" },
  { name: "arriving", light: "#2f9aa8", dark: "#49b6c4" },
];
// Nobody holds a block that is one of these.
export const FREE = new Set([1, 2]);
export const DEVICE_STATES = new Set([1, 2, 3, 4, 5, 6]);
export const CPU_STATES = new Set([1, 2, 7]);

const dark = matchMedia("(prefers-color-scheme: dark)");

/** The state's colour as the page is shown now. */
export function colour(state) {
  return dark.matches ? STATES[state].dark : STATES[state].light;
}
