// Calls under way, which can be cancelled, and the log of those that have ended.
import { del, get } from "./api.js";
import { button, complaints } from "./actions.js";
import { attr, h, keyed, setPill, text } from "./dom.js";
import { ago, bytes, count, megabytes, moment, span } from "./format.js";
import { modelLink, several, state, workerLink } from "./state.js";

const OUTCOMES = ["done", "error", "refused", "cancelled", "died", "deadline"];
const PAGE = 25;
const MOST = 500; // rows on the page
const QUIET = 4000; // ms between two readings of the log while calls end

const named = (call) => (call.model === call.task ? call.task : `${call.task} · ${call.model}`);

export function runningCalls(of, errors) {
  const body = h("tbody");
  const note = h("p", { class: "muted" });
  const table = h("div", { class: "scroll" }, h("table", { class: "cards" },
    h("thead", {}, h("tr", {}, ["Call", "Model", "State", "Queued", "Running", "In", "Out", ""].map((t, i) => h("th", { scope: "col", class: i > 2 && i < 7 ? "number" : null }, t)))), body));
  const el = h("section", { class: "panel", "aria-label": "Running calls" }, h("h2", {}, "Running calls"), table, note);
  let loading = false;

  function row(first) {
    const status = h("span", { class: "pill" });
    const cell = Object.fromEntries(["waited", "ran", "in", "out"].map((key) => [key, h("td", { class: ["in", "out"].includes(key) ? "number spare" : "number", "data-unit": { waited: "queued", ran: "running" }[key] })]));
    const cancel = button("Cancel", () => del(`/calls/${encodeURIComponent(first.request)}`).then(load), {
      errors, kind: "small danger", done: `call ${first.request} is cancelled`,
      ask: { title: "Cancel this call?", words: `${first.request} of ${named(first)}. Its caller is notified, and the model can see that it was cancelled.`, verb: "Cancel the call" },
    });
    attr(cancel, "aria-label", `Cancel call ${first.request}`);
    return {
      el: h("tr", {}, h("th", { scope: "row", class: "name" }, h("code", { class: "wraps" }, first.request)), h("td", {}, h("a", { href: modelLink(first.task, first.model), class: "wraps" }, named(first))), h("td", {}, status), cell.waited, cell.ran, cell.in, cell.out, h("td", { class: "act" }, cancel)),
      update(call) {
        setPill(status, call.state);
        text(cell.waited, span(call.waited_ms / 1000));
        text(cell.ran, call.running_ms === null ? "" : span(call.running_ms / 1000));
        text(cell.in, bytes(call.bytes_in));
        text(cell.out, bytes(call.bytes_out));
        cancel.hidden = call.state === "leaving";
      },
    };
  }

  async function load() {
    if (loading) return;
    loading = true;
    try {
      const found = await get("/calls/running");
      const calls = found.calls.filter((call) => !of || (call.task === of.task && call.model === of.model));
      keyed(body, calls.slice(0, 50), (call) => `${call.request} ${call.asked_at}`, row);
      table.hidden = !calls.length;
      const hidden = calls.length - 50 + (found.total - found.calls.length);
      text(note, !calls.length ? "No call is running." : hidden > 0 ? `and ${count(hidden)} more` : "");
    } finally {
      loading = false;
    }
  }
  return { el, load: () => load().catch((error) => errors.say(`Running calls could not be read: ${error.message}`)) };
}

export function callLog(of, query) {
  const filters = { task: of?.task ?? query.get("task") ?? "", model: of?.model ?? query.get("model") ?? "", outcome: query.get("outcome") ?? "", request: query.get("request") ?? "" };
  const errors = complaints();
  const chips = h("div", { class: "row chips", role: "group", "aria-label": "Outcome" }, ["", ...OUTCOMES].map((outcome) => {
    const el = h("button", { type: "button", class: "chip", "aria-pressed": String(filters.outcome === outcome) }, outcome || "all");
    el.onclick = () => change({ outcome });
    return el;
  }));
  const search = h("input", { type: "search", placeholder: "Request id", "aria-label": "Request id", value: filters.request, maxlength: 128 });
  const form = h("form", { class: "grow", role: "search" }, search);
  form.onsubmit = (event) => {
    event.preventDefault();
    change({ request: search.value.trim() });
  };
  search.addEventListener("search", () => change({ request: search.value.trim() }));
  const which = h("select", { "aria-label": "Model" }, h("option", { value: "" }, "all models"));
  which.onchange = () => {
    const [task, model] = which.value ? JSON.parse(which.value) : ["", ""];
    change({ task, model });
  };
  const body = h("tbody");
  const where = h("th", { scope: "col", class: "node" }, "Node");
  const table = h("div", { class: "scroll" }, h("table", { class: "cards" },
    h("thead", {}, h("tr", {}, ["Call", "Model", "Outcome", "Queued", "Took", "In", "Out", "Peak memory", "Received"].map((t, i) => h("th", { scope: "col", class: i > 2 ? "number" : null }, t)), where)), body));
  const note = h("p", { class: "muted" });
  const older = h("button", { type: "button", hidden: true }, "Show older");
  const el = h("section", { class: "panel", "aria-label": "Call log" }, h("h2", {}, "Call log"),
    h("div", { class: "row wrap filters" }, chips, form, of ? null : which), errors.el, table, note, h("div", { class: "row" }, older));
  let rows = [];
  let next = null;
  let turn = 0;
  let read = 0;

  function change(values) {
    const wanted = new URLSearchParams(Object.entries({ ...filters, ...values, ...(of ? { task: "", model: "" } : {}) }).filter(([, v]) => v));
    const target = `${of ? modelLink(of.task, of.model) : "#/calls"}${wanted.size ? `?${wanted}` : ""}`;
    if (location.hash !== target) location.hash = target;
  }

  async function load(before = null) {
    const mine = ++turn;
    read = Date.now();
    try {
      const wanted = new URLSearchParams(Object.entries({ ...filters, limit: PAGE, before }).filter(([, v]) => v));
      const found = await get(`/calls?${wanted}`);
      if (mine !== turn) return;
      errors.clear();
      // While older pages are shown, the newest are put before them.
      rows = before ? [...rows, ...found.calls] : rows.length > PAGE ? [...found.calls, ...rows.filter((r) => r.id < (found.calls.at(-1)?.id ?? 0))] : found.calls;
      if (before || rows.length <= PAGE) next = found.next;
      draw(found.left_out);
    } catch (error) {
      errors.say(`The log could not be read: ${error.message}`);
    }
  }

  function draw(left) {
    where.hidden = !several();
    keyed(body, rows.slice(0, MOST), (call) => `${call.id} ${call.node}`, logRow);
    table.hidden = !rows.length;
    older.hidden = !next || rows.length >= MOST;
    const omitted = Object.values(left).reduce((sum, n) => sum + n, 0);
    const words = omitted ? `${count(omitted)} calls since the node started were counted but not listed: under heavy load, only a sample is logged.` : "";
    text(note, !rows.length ? `No calls match. ${words}` : words);
    for (const m of state.calls.values()) {
      const value = JSON.stringify([m.task, m.model]);
      if (![...which.options].some((o) => o.value === value)) which.append(h("option", { value }, named(m)));
    }
    which.value = filters.task ? JSON.stringify([filters.task, filters.model]) : "";
  }
  older.onclick = () => load(next);
  return { el, look: async () => (Date.now() - read > QUIET ? load() : null), focus: () => search.focus() };
}

function logRow(call) {
  const status = h("span", { class: "pill" });
  setPill(status, call.outcome);
  const why = call.outcome === "done" ? "" : call.code ?? `HTTP ${call.status}`;
  const node = h("td", { class: "node spare" }, call.node.replace(/@[^@]*$/, ""));
  const when = h("td", { class: "number" });
  const worker = call.worker && h("a", { href: workerLink(several() ? `${call.node}/${call.worker}` : call.worker), class: "muted small-print" }, call.worker);
  const memory = [call.host_mb && megabytes(call.host_mb), call.gpu_mb && `${megabytes(call.gpu_mb)} GPU`].filter(Boolean).join(", ");
  return {
    el: h("tr", {}, h("th", { scope: "row", class: "name" }, h("code", { class: "wraps" }, call.request)), h("td", {}, h("a", { href: modelLink(call.task, call.model), class: "wraps" }, named(call)), " ", worker),
      h("td", {}, status, h("span", { class: "muted small-print" }, ` ${why}${call.streamed ? " streamed" : ""}`)), h("td", { class: "number", "data-unit": "queued" }, span(call.waited_ms / 1000)), h("td", { class: "number", "data-unit": "running" }, call.took_ms === null ? "" : span(call.took_ms / 1000)),
      h("td", { class: "number spare" }, bytes(call.bytes_in)), h("td", { class: "number spare" }, bytes(call.bytes_out)), h("td", { class: "number spare" }, memory), when, node),
    update() {
      text(when, ago(call.asked_at));
      attr(when, "title", moment(call.asked_at));
      node.hidden = !several();
    },
  };
}
