// All jobs: filter, search, follow, and do something about many of them at once.
import { get, post } from "./api.js";
import { button, complaints } from "./actions.js";
import { attr, bar, fill, h, keyed, setPill, text } from "./dom.js";
import { ago, count, moment, now, span } from "./format.js";
import { newJob } from "./enqueue.js";
import { nodeLabel, several, state } from "./state.js";

const STATUSES = ["queued", "processing", "done", "failed", "cancelled"];
const PAGE = 50;
const MOST = 500; // rows on the page

export function page(_, query) {
  const filters = { status: query.get("status") ?? "", queue: query.get("queue") ?? "", task: query.get("task") ?? "", code: query.get("code") ?? "", search: query.get("search") ?? "" };
  let rows = []; // newest first
  let next = null;
  let loading = 0;
  let dirty = 0;
  const chosen = new Set();
  const errors = complaints();

  // ---- the head
  const chips = h("div", { class: "row chips", role: "group", "aria-label": "Status" }, ["", ...STATUSES].map((status) => {
    const el = h("button", { type: "button", class: "chip", "aria-pressed": String(filters.status === status), "data-status": status }, status || "all");
    el.onclick = () => change({ status });
    return el;
  }));
  const search = h("input", { type: "search", placeholder: "Search id, task, arguments, error", "aria-label": "Search", value: filters.search, maxlength: 200 });
  const form = h("form", { class: "grow", role: "search" }, search);
  form.onsubmit = (event) => {
    event.preventDefault();
    change({ search: search.value.trim() });
  };
  search.addEventListener("search", () => change({ search: search.value.trim() }));
  const queue = select("Queue", "all queues", filters.queue, (value) => change({ queue: value }));
  const task = select("Task", "all tasks", filters.task, (value) => change({ task: value }));
  const fresh = h("button", { type: "button", class: "primary" }, "New job");
  fresh.onclick = () => newJob();

  // ---- the bulk bar
  const picked = h("span");
  const ids = () => [...chosen];
  const many = (label, act, ask) => button(label, act, { errors, kind: "small", ask: () => ({ title: `${label}?`, words: ask(chosen.size), verb: label, danger: label === "Cancel" }) });
  const cancelPicked = many("Cancel", async () => told(await post("/jobs/cancel", { ids: ids() })), (n) => `${count(n)} chosen ${n === 1 ? "job" : "jobs"}: queued ones end at once, running ones are asked first and then killed.`);
  const retryPicked = many("Retry", retryAll, (n) => `${count(n)} chosen ${n === 1 ? "job" : "jobs"}: those that have ended go back into their queues with a fresh budget.`);
  const bulk = h("div", { class: "row bulk", role: "group", "aria-label": "Chosen jobs" }, picked, cancelPicked, retryPicked, h("button", { type: "button", class: "quiet small", onclick: () => pick([]) }, "Choose none"));
  const everything = h("div", { class: "row" });

  // ---- the table
  const body = h("tbody");
  const all = h("input", { type: "checkbox", "aria-label": "Choose all on this page" });
  all.onchange = () => pick(all.checked ? rows.map((job) => job.id) : []);
  const where = h("th", { scope: "col" }, "Node");
  const table = h("table", { class: "jobs cards" }, h("thead", {}, h("tr", {}, h("th", { class: "check" }, all), ["Job", "Task", "Status", "Progress", "Queue", "Runs"].map((t) => h("th", { scope: "col" }, t)), where, ["Worker", "Created", "Took"].map((t) => h("th", { scope: "col" }, t)))), body);
  const note = h("p", { class: "muted" });
  const older = h("button", { type: "button" }, "Show older");
  older.onclick = () => load(next);
  const el = h("div", {},
    h("div", { class: "row between" }, h("h1", {}, "Jobs"), fresh),
    h("div", { class: "panel" },
      h("div", { class: "row wrap" }, chips, form, queue.el, task.el),
      h("div", { class: "row between wrap" }, bulk, everything),
      errors.el,
      h("div", { class: "scroll" }, table), note, h("div", { class: "row" }, older)));

  function change(values) {
    const wanted = new URLSearchParams(Object.entries({ ...filters, ...values }).filter(([, v]) => v));
    const target = `#/jobs${wanted.size ? `?${wanted}` : ""}`;
    if (location.hash !== target) location.hash = target;
  }

  function fits(job) {
    return (!filters.status || job.status === filters.status) && (!filters.queue || job.queue === filters.queue) && (!filters.task || job.task === filters.task) && (!filters.code || job.error?.code === filters.code);
  }

  async function load(cursor = null) {
    const turn = ++loading;
    const wanted = new URLSearchParams(Object.entries({ ...filters, limit: PAGE, ...(cursor ? { cursor } : {}) }).filter(([, v]) => v));
    attr(table, "aria-busy", true);
    try {
      const found = await get(`/jobs?${wanted}`);
      if (turn !== loading) return;
      rows = cursor ? [...rows, ...found.jobs] : found.jobs;
      next = found.next;
      draw();
    } catch (error) {
      errors.say(`The jobs could not be listed: ${error.message}`);
    } finally {
      attr(table, "aria-busy", null);
    }
  }

  function told(said) {
    const n = said.cancelled ?? said.retried;
    pick([]);
    load();
    return `${count(n)} ${said.cancelled === undefined ? "retried" : "cancelled"}`;
  }

  /** A retry names one status; the chosen jobs may have several. */
  async function retryAll() {
    let retried = 0;
    for (const status of ["failed", "cancelled", "done"]) {
      const some = rows.filter((job) => chosen.has(job.id) && job.status === status).map((job) => job.id);
      if (some.length) retried += (await post("/jobs/retry", { ids: some, status })).retried;
    }
    return told({ retried });
  }

  function pick(list) {
    chosen.clear();
    for (const id of list) chosen.add(id);
    draw();
  }

  function draw() {
    const shown = rows.slice(0, MOST);
    where.hidden = !several();
    keyed(body, shown, (job) => job.id, (job) => jobRow(job, chosen, draw));
    const filtered = Object.values(filters).some(Boolean);
    text(note, shown.length ? "" : filtered ? (next ? "None among the newest 20,000; look further back." : "No job fits.") : "No jobs yet. Enqueue one with “New job”, or: ostler enqueue TASK key=value");
    older.hidden = !next || rows.length >= MOST;
    bulk.hidden = !chosen.size;
    text(picked, `${count(chosen.size)} chosen`);
    const live = rows.some((job) => chosen.has(job.id) && ["queued", "processing"].includes(job.status));
    const ended = rows.some((job) => chosen.has(job.id) && ["done", "failed", "cancelled"].includes(job.status));
    cancelPicked.hidden = !live;
    retryPicked.hidden = !ended;
    all.checked = shown.length > 0 && shown.every((job) => chosen.has(job.id));
    all.indeterminate = chosen.size > 0 && !all.checked;
  }

  /** Buttons for everything that the filter fits, also what is not on the page. */
  function forAll() {
    const conditions = Object.fromEntries(Object.entries(filters).filter(([k, v]) => v && k !== "search"));
    const where = Object.entries(conditions).map(([k, v]) => `${k} ${v}`).join(", ");
    if (filters.search || !where) return fill(everything);
    const live = ["queued", "processing"].includes(filters.status) || !filters.status;
    const limit = 10_000;
    fill(everything,
      live && button("Cancel all that fit", async () => told(await post("/jobs/cancel", { ...conditions, limit })), { errors, kind: "small", ask: { title: "Cancel all that fit?", words: `Every live job with ${where} (up to ${count(limit)}) is cancelled.`, verb: "Cancel all" } }),
      ["failed", "cancelled"].includes(filters.status) && button("Redrive all that fit", async () => told(await post("/jobs/retry", { ...conditions, limit })), { errors, kind: "small", ask: { title: "Redrive all that fit?", words: `Every job with ${where} (up to ${count(limit)}) goes back into its queue with a fresh budget.`, verb: "Redrive", danger: false } }));
  }

  /** What the stream told: known rows change, others come where they belong, down to the oldest that is shown. */
  function take() {
    const place = new Map(rows.map((job, i) => [job.id, i]));
    let moved = false;
    for (const job of state.jobs.values()) {
      const at = place.get(job.id);
      if (at !== undefined) {
        if (rows[at].seq !== job.seq) rows[at] = { ...rows[at], ...job };
        moved = true;
      } else if (!filters.search && fits(job) && (!rows.length || job.id > rows.at(-1).id || (next === null && rows.length < MOST))) {
        rows.push(job);
        moved = true;
      }
    }
    if (!moved) return;
    // A row that no longer fits the filter leaves, unless it was chosen.
    rows = rows.filter((job) => filters.search || fits(job) || chosen.has(job.id)).sort((a, b) => b.id - a.id);
    if (rows.length > MOST) {
      rows = rows.slice(0, MOST);
      next = rows.at(-1).id;
    }
    draw();
  }

  function offer() {
    queue.offer([...state.queues.keys()]);
  }
  get("/info").then((info) => task.offer(info.tasks.map((t) => t.name)), () => {});
  forAll();
  draw();
  load();
  return {
    el,
    title: "Jobs",
    focus: () => search.focus(),
    update(changes) {
      if (changes.has("queues") || changes.has("snapshot")) offer();
      if (changes.has("jobs")) take();
      // More changed than was told, or everything was told anew: list again, but not more than once a second.
      if (changes.has("flood") || changes.has("snapshot")) dirty ||= setTimeout(() => ((dirty = 0), load()), 1000);
    },
    tick: draw,
    close: () => clearTimeout(dirty),
  };
}

function select(label, every, value, changed) {
  const el = h("select", { "aria-label": label }, h("option", { value: "" }, every));
  if (value) el.append(h("option", { value, selected: true }, value));
  el.onchange = () => changed(el.value);
  return {
    el,
    offer(names) {
      for (const name of names.sort()) if (![...el.options].some((o) => o.value === name)) el.append(h("option", { value: name }, name));
    },
  };
}

/** Arguments on one line: listings and the stream have them as JSON text in ASCII, cut off. */
const brief = (args) => {
  const words = args.replace(/\\\\|\\u([0-9a-f]{4})/g, (all, code) => (code > "001f" ? String.fromCharCode(Number.parseInt(code, 16)) : all));
  return words === "{}" ? "" : words;
};

function jobRow(first, chosen, draw) {
  const check = h("input", { type: "checkbox", "aria-label": `Choose job ${first.id}` });
  check.onchange = () => {
    if (check.checked) chosen.add(first.id);
    else chosen.delete(first.id);
    draw();
  };
  const status = h("span", { class: "pill" });
  const why = h("span", { class: "muted cut why" });
  const progress = bar(`Progress of job ${first.id}`);
  const cell = Object.fromEntries(["runs", "node", "worker", "created", "took"].map((name) => [name, h("td", { class: name === "created" ? "act muted" : "spare" })]));
  const el = h("tr", { id: `job-${first.id}` }, h("td", { class: "check" }, check), h("th", { scope: "row" }, h("a", { href: `#/jobs/${first.id}` }, `#${first.id}`)),
    h("td", { class: "what" }, h("a", { href: `#/jobs/${first.id}` }, first.task), h("span", { class: "muted cut" }, brief(first.args))),
    h("td", {}, status, why), h("td", { class: "work" }, progress.el), h("td", { class: "spare" }, first.queue), cell.runs, cell.node, cell.worker, cell.created, cell.took);
  return {
    el,
    update(job) {
      check.checked = chosen.has(job.id);
      setPill(status, job.cancel_requested && job.status === "processing" ? "cancelling" : job.status);
      text(why, job.status === "failed" || (job.status === "queued" && job.error) ? job.error?.code : job.status === "processing" ? (job.stage ?? "") : "");
      progress.el.hidden = job.progress === null || job.progress === undefined;
      progress.update(job.status === "done" ? 100 : job.progress);
      text(cell.runs, job.attempt ? `${job.attempt}${job.crashes ? `, ${job.crashes} crashed` : ""}` : "");
      text(cell.node, nodeLabel(job.node_id));
      cell.node.hidden = !several();
      text(cell.worker, job.worker ? job.worker.replace("worker:", "") : "");
      text(cell.created, ago(job.created_at));
      attr(cell.created, "title", moment(job.created_at));
      text(cell.took, job.started_at ? span(((job.finished_at ?? now()) - job.started_at) / 1000) : "");
    },
  };
}
