// The sessions that are under way, which can be watched and ended, and those that have ended, with the reason.
import { del, get } from "./api.js";
import { button, complaints } from "./actions.js";
import { attr, h, keyed, setPill, text } from "./dom.js";
import { ago, bytes, count, moment, since, span } from "./format.js";
import { nodeLabel, several, state, workerLink } from "./state.js";

const FIRST = 25; // rows before somebody asks for more
const PAGE = 25;
const MOST = 500;
const QUIET = 4000; // ms between two readings of the log while sessions end

/** Why sessions end. */
export const REASONS = {
  client: "The client closed it.",
  worker: "The worker closed it.",
  refused: "The worker refused the handshake.",
  idle: "Nothing was sent for as long as the pool allows.",
  longest: "It lasted as long as the pool allows.",
  killed: "An operator ended it.",
  silent: "The client did not answer pings.",
  slow: "The client did not read what it was sent.",
  drained: "Its worker was draining, and the drain limit was reached.",
  shutdown: "The node stopped.",
  "worker-lost": "Its worker died.",
  "worker-hung": "Its worker hung, and was killed.",
  "relay-lost": "The data plane died.",
  "node-lost": "The node died.",
  unused: "Its ticket was not used in time.",
  detached: "Nobody reconnected to it in time.",
};

export const sessionLink = (id) => `#/sessions/${encodeURIComponent(id)}`;

/** The button that ends one. */
export function endButton(session, errors, kind = "small danger") {
  const el = button("End", () => del(`/sessions/${encodeURIComponent(session.id)}`), {
    errors, kind, done: `session ${session.id} is being ended`,
    ask: { title: "End this session?", words: `${session.id} of ${session.owner}, on ${session.worker}. Its client is told that an operator ended it.`, verb: "End the session" },
  });
  attr(el, "aria-label", `End session ${session.id}`);
  return el;
}

/** A worker's name, with its node where there are several. Nodes that share a registry alone know no more of each other's workers. */
export function workerOf(session, own = session.node) {
  if (several()) return h("a", { href: workerLink(`${session.node}/${session.worker}`), class: "wraps" }, `${nodeLabel(session.node)}/${session.worker}`);
  if (session.node !== own) return h("span", { class: "wraps" }, `${nodeLabel(session.node)}/${session.worker}`);
  return h("a", { href: workerLink(session.worker), class: "wraps" }, session.worker);
}

/** Filters for both lists, kept in the address. */
function filtering(query) {
  const filters = { pool: query.get("pool") ?? "", owner: query.get("owner") ?? "" };
  const which = h("select", { "aria-label": "Pool" }, h("option", { value: "" }, "all pools"));
  const owner = h("input", { type: "search", placeholder: "Owner", "aria-label": "Owner", value: filters.owner, maxlength: 200 });
  const form = h("form", { class: "grow", role: "search" }, owner);
  const change = (values) => {
    const wanted = new URLSearchParams(Object.entries({ ...filters, ...values }).filter(([, v]) => v));
    const target = `#/sessions${wanted.size ? `?${wanted}` : ""}`;
    if (location.hash !== target) location.hash = target;
  };
  form.onsubmit = (event) => {
    event.preventDefault();
    change({ owner: owner.value.trim() });
  };
  owner.addEventListener("search", () => change({ owner: owner.value.trim() }));
  which.onchange = () => change({ pool: which.value });
  return {
    el: h("div", { class: "row wrap filters" }, form, which),
    filters,
    change,
    fits: (s) => (!filters.pool || [s.pool, s.serves].includes(filters.pool)) && (!filters.owner || s.owner === filters.owner),
    draw() {
      for (const name of new Set([...state.sessions.keys(), filters.pool])) if (name && ![...which.options].some((o) => o.value === name)) which.append(h("option", { value: name }, name));
      which.value = filters.pool;
    },
    focus: () => owner.focus(),
  };
}

export function liveSessions(query) {
  const errors = complaints();
  const by = filtering(query);
  const body = h("tbody");
  const total = h("span", { class: "muted" });
  const note = h("p", { class: "muted" });
  const all = h("button", { type: "button", hidden: true }, "Show all");
  const table = h("div", { class: "scroll" }, h("table", { class: "cards sessions" },
    h("thead", {}, h("tr", {}, ["Session", "State", "Owner", "Client", "Worker", "Age", "Idle", "In", "Out", ""].map((t, i) => h("th", { scope: "col", class: i > 4 && i < 9 ? "number" : null }, t)))), body));
  const el = h("section", { class: "panel", "aria-label": "Live sessions" }, h("div", { class: "row between wrap" }, h("h2", {}, "Live sessions ", total), by.el), errors.el, table, note, h("div", { class: "row" }, all));
  let shown = FIRST;
  let sessions = [];
  let own = null;
  let beyond = 0;
  let read = Date.now();
  all.onclick = () => {
    shown = MOST;
    draw();
  };

  function draw() {
    by.draw();
    const fitting = sessions.filter(by.fits);
    const older = (Date.now() - read) / 1000;
    keyed(body, fitting.slice(0, shown).map((s) => ({ ...s, own, idle: s.idle === null ? null : s.idle + older })), (s) => s.id, (s) => liveRow(s, errors, by));
    table.hidden = !fitting.length;
    text(total, fitting.length ? `${count(fitting.length)}${beyond ? " of more" : ""}` : "");
    const hidden = fitting.length - shown;
    all.hidden = hidden <= 0;
    text(note, !fitting.length ? (sessions.length ? "No live sessions match." : "Nobody is connected.") : hidden > 0 ? `and ${count(hidden)} more` : "");
    note.hidden = !note.textContent;
  }
  return {
    el,
    update(found, node, more) {
      [sessions, own, beyond, read] = [found, node, more, Date.now()];
      draw();
    },
    tick: draw,
    focus: () => by.focus(),
  };
}

function liveRow(first, errors, by) {
  const status = h("span", { class: "pill" });
  const cell = Object.fromEntries(["age", "idle", "in", "out"].map((key) => [key, h("td", { class: ["in", "out"].includes(key) ? "number spare" : "number", "data-unit": { age: "old", idle: "idle" }[key] })]));
  const owner = h("button", { type: "button", class: "quiet link cut", title: `Only sessions of ${first.owner}` }, first.owner);
  owner.onclick = () => by.change({ owner: first.owner });
  const watch = h("a", { class: "button small", href: sessionLink(first.id), "aria-label": `Watch session ${first.id}` }, "Watch");
  const end = endButton(first, errors);
  const key = first.key ? h("span", { class: "muted small-print cut block", title: first.key }, first.key) : null;
  return {
    el: h("tr", { id: `session-${first.id}` }, h("th", { scope: "row", class: "id" }, h("a", { href: sessionLink(first.id) }, h("code", {}, first.id)), key), h("td", {}, status), h("td", { class: "who" }, owner),
      h("td", { class: "spare who" }, h("span", { class: "cut block", title: [first.client, first.agent].filter(Boolean).join("\n") }, first.client ?? ""), h("span", { class: "muted small-print cut block" }, first.agent ?? "")),
      h("td", {}, workerOf(first, first.own)), cell.age, cell.idle, cell.in, cell.out, h("td", { class: "act verbs" }, watch, end)),
    update(s) {
      setPill(status, s.state);
      text(cell.age, since(s.started_at));
      attr(cell.age, "title", `since ${moment(s.started_at)}, ${span(s.waited_ms / 1000)} waiting`);
      text(cell.idle, s.idle === null ? "" : s.idle < 1 ? "" : span(s.idle));
      text(cell.in, bytes(s.bytes_in));
      text(cell.out, bytes(s.bytes_out));
      watch.hidden = !s.views;
    },
  };
}

export function endedSessions(query) {
  const errors = complaints();
  const by = filtering(query);
  const body = h("tbody");
  const note = h("p", { class: "muted" }, "None yet.");
  const older = h("button", { type: "button", hidden: true }, "Show older");
  const table = h("div", { class: "scroll" }, h("table", { class: "cards sessions" },
    h("thead", {}, h("tr", {}, ["Session", "Reason", "Owner", "Worker", "Lasted", "Waited", "In", "Out", "Ended"].map((t, i) => h("th", { scope: "col", class: i > 3 ? "number" : null }, t)))), body));
  const el = h("section", { class: "panel", "aria-label": "Ended sessions" }, h("h2", {}, "Ended sessions"), errors.el, table, note, h("div", { class: "row" }, older));
  let rows = [];
  let next = null;
  let turn = 0;
  let read = 0;

  async function load(before = null) {
    const mine = ++turn;
    read = Date.now();
    try {
      const wanted = new URLSearchParams(Object.entries({ ...by.filters, state: "ended", limit: PAGE, before }).filter(([, v]) => v));
      const found = await get(`/sessions?${wanted}`);
      if (mine !== turn) return;
      errors.clear();
      // While older pages are shown, the newest are put before them.
      const fresh = new Set(found.sessions.map((s) => s.id));
      rows = before ? [...rows, ...found.sessions] : rows.length > PAGE ? [...found.sessions, ...rows.filter((r) => !fresh.has(r.id))] : found.sessions;
      if (before || rows.length <= PAGE) next = found.next;
      draw();
    } catch (error) {
      errors.say(`Ended sessions could not be read: ${error.message}`);
    }
  }

  function draw() {
    keyed(body, rows.slice(0, MOST), (s) => s.id, endedRow);
    table.hidden = !rows.length;
    text(note, by.filters.pool || by.filters.owner ? "None match." : "None yet.");
    note.hidden = rows.length > 0;
    older.hidden = !next || rows.length >= MOST;
  }
  older.onclick = () => load(next);
  return { el, look: async () => (Date.now() - read > QUIET ? load() : null), tick: draw };
}

function endedRow(first) {
  const status = h("span", { class: "pill" });
  setPill(status, first.reason ?? "ended");
  attr(status, "title", REASONS[first.reason]);
  const when = h("td", { class: "number" });
  const code = first.code ? `close code ${first.code}` : null;
  return {
    el: h("tr", {}, h("th", { scope: "row", class: "id" }, h("a", { href: sessionLink(first.id) }, h("code", {}, first.id))), h("td", { class: "why-ended" }, status, h("span", { class: "muted small-print cut block", title: [first.text, code].filter(Boolean).join("\n") }, first.text ?? "")),
      h("td", { class: "who" }, h("span", { class: "cut block", title: first.owner }, first.owner)), h("td", {}, workerOf(first)), h("td", { class: "number", "data-unit": "long" }, span((first.ended_at - first.started_at) / 1000)), h("td", { class: "number spare" }, span(first.waited_ms / 1000)),
      h("td", { class: "number spare" }, bytes(first.bytes_in)), h("td", { class: "number spare" }, bytes(first.bytes_out)), when),
    update() {
      text(when, ago(first.ended_at));
      attr(when, "title", moment(first.ended_at));
    },
  };
}
