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

/** Keep one row per item, in order, behind the child `after`: `make(item)` gives {el, update(item)}; rows that go are removed. */
export function keyed(parent, items, keyOf, make, after = null) {
  const rows = (parent.ostlerRows ??= new Map());
  const wanted = new Set();
  let before = after ? after.nextElementSibling : parent.firstElementChild;
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

// What states mean: a tone and a mark. A state that is not named here is idle.
const TONES = {
  good: { "●": ["healthy", "ready", "available"], "✓": ["done"] },
  calm: { "▸": ["processing", "busy", "running", "streaming", "live"], "◔": ["starting", "building", "opening", "loading"], "Ⅱ": ["parked"] },
  warn: {
    "Ⅱ": ["paused"], "◔": ["draining", "stopping", "cancelling", "leaving"],
    "!": ["crashed", "suspect", "longest", "killed", "silent", "slow", "drained", "shutdown", "refused", "outdated", "not built", "unavailable", "no worker", "no task", "unused", "detached"],
  },
  bad: { "✕": ["failed", "dead", "error", "died", "deadline", "worker-lost", "worker-hung", "relay-lost", "node-lost"] },
  idle: { "✓": ["client", "worker"], "–": ["cancelled"] },
};
const MARKS = new Map(Object.entries(TONES).flatMap(([tone, marks]) => Object.entries(marks).flatMap(([mark, words]) => words.map((word) => [word, { tone, mark }]))));

/** A state as a pill: word and mark, so that nobody depends on its colour. */
export function pill(word) {
  const el = h("span", { class: "pill" });
  if (word) setPill(el, word);
  return el;
}

export function setPill(el, word) {
  const { tone, mark } = MARKS.get(word) ?? { tone: "idle", mark: "○" };
  attr(el, "data-state", word);
  attr(el, "data-tone", tone);
  attr(el, "data-mark", mark);
  text(el, word);
}

/** Facts with their names: {el, update([[name, value], …])}. A value is text or {text, href, title}; one that is empty is left out. */
export function facts() {
  const el = h("dl", { class: "facts" });
  const make = ([name]) => {
    const link = h("a", { class: "wraps" });
    const words = h("span");
    return {
      el: h("div", {}, h("dt", {}, name), h("dd", {}, link, words)),
      update([, value]) {
        const found = value.text === undefined ? { text: value } : value;
        link.hidden = !found.href;
        text(link, found.href ? found.text : "");
        attr(link, "href", found.href);
        text(words, found.href ? "" : found.text);
        attr(words, "title", found.title);
      },
    };
  };
  const given = (value) => value !== null && value !== undefined && value !== "" && value !== false && (value.text === undefined || value.text);
  return { el, update: (list) => keyed(el, list.filter(([, value]) => given(value)), ([name]) => name, make) };
}

/** A table: columns are {name, class, hidden} or a name; numbers have the class "number". {el, head, body}. */
export function table(kind, columns, label) {
  const cells = columns.map((column) => h("th", { scope: "col", class: column.class }, column.name ?? column));
  const body = h("tbody");
  const head = h("thead", {}, h("tr", {}, cells));
  return { el: h("div", { class: "scroll" }, h("table", { class: kind, "aria-label": label }, head, body)), cells, head, body };
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
