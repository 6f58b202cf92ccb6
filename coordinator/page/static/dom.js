// Elements made of text alone: nothing that a board, a broker or a proxy says becomes markup.

export const byId = (id) => document.getElementById(id);

// made("p", { class: "detail", id: "x" }, "text", other, …); an attribute that is null or false is left out.
export function made(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((each) => each !== null && each !== undefined && each !== false));
  return element;
}

// A sentence in which `commands` stand between backquotes.
export const prose = (words) =>
  words.split("`").map((part, at) => (at % 2 ? made("code", {}, part) : document.createTextNode(part)));

const SVG = "http://www.w3.org/2000/svg";

export function drawn(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const shown = new WeakMap();

// Fills a place when what it is made of has changed. What had the focus keeps it, what was open stays open.
export function fill(place, values, make) {
  const key = JSON.stringify(values);
  if (shown.get(place) === key) return;
  shown.set(place, key);
  const active = document.activeElement;
  const focused = place.contains(active) ? active.id : null;
  const opened = [...place.querySelectorAll("details[open]")].map((each) => each.id).filter(Boolean);
  const scrolled = [...place.querySelectorAll(".scroll[id]")].map((each) => [each.id, each.scrollTop, each.scrollLeft]);
  place.replaceChildren(...[make()].flat().filter(Boolean));
  for (const id of opened) byId(id)?.setAttribute("open", "");
  for (const [id, top, left] of scrolled) byId(id)?.scrollTo({ top, left });
  if (focused) byId(focused)?.focus({ preventScroll: true });
}

// A table with a heading for each column: [text, is it words?].
export function table(caption, columns, rows, attributes = {}) {
  const kind = (at) => (columns[at][1] ? "words" : null);
  return made(
    "table", attributes,
    made("caption", { class: "unseen" }, caption),
    made("thead", {}, made("tr", {}, ...columns.map(([text], at) => made("th", { scope: "col", class: kind(at) }, text)))),
    made("tbody", {}, ...rows.map((row) => (row instanceof Element ? row : made("tr", {}, ...row.map((cell, at) =>
      made(at ? "td" : "th", { scope: at ? null : "row", class: kind(at) }, cell ?? "–")))))),
  );
}

// What may be larger than its place, reached by the keyboard.
export function scrollable(id, label, child) {
  return made("div", { class: "scroll", id, tabindex: "0", role: "region", "aria-label": label }, child);
}
