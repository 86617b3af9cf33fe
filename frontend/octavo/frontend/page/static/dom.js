// Finding and making elements.

export const $ = (id) => document.getElementById(id);

export function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

/** A row of cells: those of `names` get their text from `texts`, and their name as a class. */
export function row(tag, names, texts) {
  const made = element("tr");
  made.append(...names.map((name, index) => element(tag, texts[index], name)));
  return made;
}
