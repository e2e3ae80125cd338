// Small tools to build and update the page. Updates touch only what changed, so focus, selection and scroll stay.

/** An element: h("a", {href: "#/", class: "x", onclick: f}, child, "text", [more]). Null and false are left out. */
export function h(tag, props, ...children) {
  const el = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) el.addEventListener(name.slice(2), value);
    else el.setAttribute(name, value === true ? "" : value);
  }
  append(el, children);
  return el;
}

export function append(el, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    el.append(child);
  }
}

const SVG = "http://www.w3.org/2000/svg";

/** The same for SVG. */
export function s(tag, props, ...children) {
  const el = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    el.setAttribute(name, value);
  }
  append(el, children);
  return el;
}

/** Set the text of an element, if it is another one. */
export function text(el, value) {
  const wanted = String(value ?? "");
  if (el.textContent !== wanted) el.textContent = wanted;
}

/** Set or remove an attribute, if it differs. */
export function attr(el, name, value) {
  if (value === null || value === undefined || value === false) el.removeAttribute(name);
  else if (el.getAttribute(name) !== String(value)) el.setAttribute(name, value === true ? "" : value);
}

/** Replace the children of an element. */
export function fill(el, ...children) {
  el.replaceChildren();
  append(el, children);
}

/** Keep one row per item, in order: `make(item)` gives {el, update(item)}; rows that go are removed. */
export function keyed(parent, items, keyOf, make) {
  const rows = (parent.ostlerRows ??= new Map());
  const wanted = new Set();
  let before = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    wanted.add(key);
    let row = rows.get(key);
    if (!row) {
      row = make(item);
      rows.set(key, row);
    }
    row.update?.(item);
    if (row.el === before) before = before.nextElementSibling;
    else parent.insertBefore(row.el, before);
  }
  for (const [key, row] of rows) {
    if (!wanted.has(key)) {
      row.el.remove();
      row.gone?.();
      rows.delete(key);
    }
  }
}

/** Say something to those who listen to the page, and show it for a moment to those who look. */
export function announce(words) {
  const el = document.getElementById("live");
  el.textContent = words;
  clearTimeout(el.ostler);
  el.ostler = setTimeout(() => (el.textContent = ""), 5000);
}

/** A state as a pill: word and mark, so that nobody depends on its colour. */
export function pill(word) {
  const el = h("span", { class: "pill" });
  setPill(el, word);
  return el;
}

export function setPill(el, word) {
  attr(el, "data-state", word);
  text(el, word);
}

/** A progress bar that updates: {el, update(percent or null, words)}. */
export function bar(label) {
  const inner = h("span", { class: "fill" });
  const words = h("span", { class: "words" });
  const track = h("span", { class: "track", role: "progressbar", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100 }, inner);
  const el = h("span", { class: "progress" }, track, words);
  return {
    el,
    update(percent, what) {
      attr(track, "aria-valuenow", percent === null || percent === undefined ? null : Math.round(percent));
      const width = `${percent ?? 0}%`;
      // It glides forward; another job, or another run, begins at once.
      inner.classList.toggle("jump", (percent ?? 0) < Number.parseFloat(inner.style.width || "0"));
      if (inner.style.width !== width) inner.style.width = width;
      text(words, what ?? (percent === null || percent === undefined ? "" : `${Math.round(percent)} %`));
    },
  };
}
