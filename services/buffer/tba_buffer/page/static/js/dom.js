// Elements without markup: every text becomes a text node, so nothing that a model has written is ever read as HTML.

/**
 * Make an element.
 *
 * @param {string} tag
 * @param {object} attributes `on...` are listeners, `style` is an object of CSS properties (set through the CSSOM, which
 *   the content security policy allows), true and false set and leave out a boolean attribute, null leaves it out.
 * @param {...(Node|string|number|null|Array)} children
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...flat(children, tag === "a" ? visible : String));
  return element;
}

function flat(children, text = String) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(text(child))));
}

/** A text with escapes for what cannot be seen or turns the direction: with these, one link could look like another. */
function visible(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\u115f\u1160\u3164\uffa0]/gu, (one) => `\\u{${one.codePointAt(0).toString(16)}}`);
}

/** A text whose parts between backticks are code. */
export function withCode(text) {
  return text.split("`").map((part, at) => (at % 2 ? h("code", {}, part) : part));
}

/** Replace what is in an element. */
export function fill(element, ...children) {
  element.replaceChildren(...flat(children));
}

/**
 * Replace what is in an element only if it differs: a reader's selection and focus survive updates without news. Tables
 * stay scrolled, and they and what has an id stay focused, also where there is some.
 */
export function fillIfChanged(element, key, make) {
  const text = JSON.stringify(key);
  if (element.dataset.key === text) return;
  element.dataset.key = text;
  const before = [...element.querySelectorAll(".scroll")].map((one) => [one.scrollLeft, one === document.activeElement]);
  const focused = element.contains(document.activeElement) ? document.activeElement.id : "";
  fill(element, make());
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  element.querySelectorAll(".scroll").forEach((one, at) => {
    const [left, hasFocus] = before[at] ?? [0, false];
    one.scrollLeft = left;
    if (hasFocus) one.focus({ preventScroll: true });
  });
}

/** Go to a view; to the one that is there already, to ask again. */
export function go(hash) {
  if (location.hash === hash) dispatchEvent(new HashChangeEvent("hashchange"));
  else location.hash = hash;
}

/** A panel: a heading, one sentence that says how to read it, and its content. */
export function panel(title, howToRead, ...children) {
  const id = `panel-${title.toLowerCase().replace(/[^a-z0-9]+/g, "-")}`;
  return h("section", { class: "panel", "aria-labelledby": id },
    h("h2", { id }, title), h("p", { class: "how" }, howToRead), ...children);
}

/** What an empty panel says. */
export function emptyText(text) {
  return h("p", { class: "empty" }, text);
}

/** A table that scrolls sideways on a narrow screen. Rows: arrays of cells (text, number or node). */
export function table(caption, columns, rows, empty) {
  if (!rows.length) return emptyText(empty);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {},
      h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell)))))));
}

/** Facts as a list of terms. Pairs whose value is null are left out. */
export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/** Horizontal bars with their numbers, readable without seeing the bars. Items: [label, number, class]. */
export function bars(caption, items, empty) {
  const total = items.reduce((sum, item) => sum + item[1], 0);
  if (!total) return emptyText(empty);
  const largest = Math.max(...items.map((item) => item[1]));
  return h("table", { class: "bars" }, h("caption", { class: "hidden" }, caption),
    h("tbody", {}, items.map(([label, number, kind]) => h("tr", { class: kind ?? null },
      h("th", { scope: "row" }, label),
      h("td", { class: "number" }, number.toLocaleString("en-US")),
      h("td", { "aria-hidden": "true" },
        h("div", { class: "bar", style: { width: `${(100 * number) / largest}%` } }))))));
}

/** Offer a text or a blob as a download. */
export function download(name, content, type) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  URL.revokeObjectURL(url);
}
