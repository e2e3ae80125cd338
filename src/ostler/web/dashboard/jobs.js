// All jobs: filter, search, follow, and act on many of them at once.
import { get, post } from "./api.js";
import { button, complaints } from "./actions.js";
import { attr, bar, fill, h, keyed, setPill, table, text } from "./dom.js";
import { ago, count, moment, now, span } from "./format.js";
import { newJob } from "./enqueue.js";
import { nodeLabel, several, state } from "./state.js";

const STATUSES = ["queued", "processing", "done", "failed", "cancelled"];
const PAGE = 50;
const MOST = 500; // rows on the page

export function page(_, query) {
  const filters = Object.fromEntries(["status", "queue", "task", "code", "batch", "search"].map((name) => [name, query.get(name) ?? ""]));
  let rows = []; // newest first
  let next = null;
  let loading = 0;
  let dirty = 0;
  let read = false;
  let missed = false; // the last list could not be read
  const chosen = new Set();
  const errors = complaints();

  // ---- the head
  const chips = h("div", { class: "row chips", role: "group", "aria-label": "Status" }, ["", ...STATUSES].map((status) => {
    const el = h("button", { type: "button", class: "chip", "aria-pressed": String(filters.status === status) }, status || "all", h("span", { class: "many", "data-status": status }));
    el.onclick = () => change({ status });
    return el;
  }));
  // What the filter has that no field above shows.
  const narrowed = h("div", { class: "row chips" }, ["code", "batch"].filter((name) => filters[name]).map((name) => h("button", { type: "button", class: "chip", "aria-pressed": "true", "aria-label": `Remove the filter ${name} ${filters[name]}`, onclick: () => change({ [name]: "" }) }, `${{ code: "error", batch: "batch" }[name]} ${filters[name]} ✕`)));
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
  const cancelPicked = many("Cancel", async () => told(await post("/jobs/cancel", { ids: ids() })), (n) => `${count(n)} selected ${n === 1 ? "job" : "jobs"}: queued ones end at once; running ones are asked to stop, then killed.`);
  const retryPicked = many("Retry", retryAll, (n) => `${count(n)} selected ${n === 1 ? "job" : "jobs"}: those that have ended go back to their queues, and their attempts start again from 1.`);
  const bulk = h("div", { class: "row bulk", role: "group", "aria-label": "Selected jobs" }, picked, cancelPicked, retryPicked, h("button", { type: "button", class: "quiet small", onclick: () => pick([]) }, "Clear selection"));
  const everything = h("div", { class: "row" });

  // ---- the table
  const all = h("input", { type: "checkbox", "aria-label": "Select all on this page" });
  all.onchange = () => pick(all.checked ? rows.map((job) => job.id) : []);
  const list = table("jobs cards", [{ name: all, class: "check" }, { name: "Job", class: "c-id" }, "Task", { name: "Status", class: "c-status" }, { name: "Queue", class: "c-queue" }, { name: "Attempt", class: "c-small number" }, { name: "Node", class: "c-queue" }, { name: "Created", class: "c-time number" }, { name: "Took", class: "c-small number" }], "Jobs");
  const where = list.cells[6];
  const note = h("p", { class: "muted" });
  const older = h("button", { type: "button" }, "Show older");
  older.onclick = () => load(next);
  const el = h("div", {},
    h("div", { class: "row between" }, h("h1", {}, filters.batch ? `Jobs of batch ${filters.batch}` : "Jobs"), fresh),
    h("div", { class: "panel" },
      h("div", { class: "row wrap filters" }, chips, narrowed, form, queue.el, task.el),
      h("div", { class: "row between wrap" }, bulk, everything),
      errors.el, list.el, note, h("div", { class: "row" }, older)));

  function change(values) {
    Object.assign(filters, values); // a second change may come before the page is made anew
    const wanted = new URLSearchParams(Object.entries(filters).filter(([, v]) => v));
    const target = `#/jobs${wanted.size ? `?${wanted}` : ""}`;
    if (location.hash !== target) location.hash = target;
  }

  function fits(job) {
    return (!filters.status || job.status === filters.status) && (!filters.queue || job.queue === filters.queue) && (!filters.task || job.task === filters.task) && (!filters.code || job.error?.code === filters.code) && (!filters.batch || job.batch === Number(filters.batch));
  }

  async function load(cursor = null) {
    const turn = ++loading;
    const wanted = new URLSearchParams(Object.entries({ ...filters, limit: PAGE, ...(cursor ? { cursor } : {}) }).filter(([, v]) => v));
    attr(list.el, "aria-busy", true);
    try {
      const found = await get(`/jobs?${wanted}`);
      if (turn !== loading) return;
      if (missed) errors.clear();
      [read, missed] = [true, false];
      rows = cursor ? [...rows, ...found.jobs] : found.jobs;
      next = found.next;
      draw();
    } catch (error) {
      missed = true;
      errors.say(`The jobs could not be listed: ${error.message}`);
    } finally {
      attr(list.el, "aria-busy", null);
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
    keyed(list.body, shown, (job) => job.id, (job) => jobRow(job, chosen, draw));
    const filtered = Object.values(filters).some(Boolean);
    text(note, shown.length || !read ? "" : filtered ? (next ? "No match among the newest 20,000 jobs. Use “Show older” to look further back." : "No jobs match.") : "No jobs yet. Enqueue one with “New job”, or on the command line: ostler enqueue TASK key=value");
    note.hidden = !note.textContent;
    list.el.hidden = !note.hidden;
    older.hidden = !next || rows.length >= MOST;
    bulk.hidden = !chosen.size;
    text(picked, `${count(chosen.size)} selected`);
    const live = rows.some((job) => chosen.has(job.id) && ["queued", "processing"].includes(job.status));
    const ended = rows.some((job) => chosen.has(job.id) && ["done", "failed", "cancelled"].includes(job.status));
    cancelPicked.hidden = !live;
    retryPicked.hidden = !ended;
    all.checked = shown.length > 0 && shown.every((job) => chosen.has(job.id));
    all.indeterminate = chosen.size > 0 && !all.checked;
  }

  /** Buttons for everything that matches the filter, also what is not on the page. */
  function forAll() {
    const conditions = Object.fromEntries(Object.entries(filters).filter(([k, v]) => v && k !== "search").map(([k, v]) => [k, k === "batch" ? Number(v) : v]));
    const words = Object.entries(conditions).map(([k, v]) => `${k} ${v}`).join(", ");
    if (filters.search || !words) return fill(everything);
    const limit = 10_000;
    const all_ = (label, verb, what, danger) => button(label, async () => told(await post(`/jobs/${verb}`, { ...conditions, limit })), { errors, kind: "small", ask: { title: `${label}?`, words: `${what} (${words}; at most ${count(limit)} at a time).`, verb: label, danger } });
    const live = ["queued", "processing", ""].includes(filters.status);
    fill(everything,
      live && all_("Cancel all matching", "cancel", "Every queued or running job that matches the filter is cancelled", true),
      ["failed", "cancelled"].includes(filters.status) && all_("Retry all matching", "retry", "Every job that matches the filter goes back to its queue, and its attempts start again from 1", false));
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

  /** What there is to choose from, and how many of each status. */
  function offer() {
    queue.offer([...state.queues.keys()]);
    const all_ = filters.queue ? state.queues.get(filters.queue) : state.total;
    const known = all_ && !filters.task && !filters.code && !filters.batch && !filters.search ? { queued: all_.pending + all_.scheduled, processing: all_.running, failed: all_.failed } : {};
    for (const el_ of chips.querySelectorAll(".many")) text(el_, known[el_.dataset.status] ? count(known[el_.dataset.status]) : "");
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
  const check = h("input", { type: "checkbox", "aria-label": `Select job ${first.id}` });
  check.onchange = () => {
    if (check.checked) chosen.add(first.id);
    else chosen.delete(first.id);
    draw();
  };
  const status = h("span", { class: "pill" });
  const why = h("span", { class: "cut block why" });
  const progress = bar(`Progress of job ${first.id}`);
  const cell = Object.fromEntries(["attempt", "node", "created", "took"].map((name) => [name, h("td", { class: { created: "number created", node: "spare cut" }[name] ?? "number spare" })]));
  const args = brief(first.args);
  const el = h("tr", { id: `job-${first.id}` }, h("td", { class: "check" }, check), h("th", { scope: "row" }, h("a", { href: `#/jobs/${first.id}` }, `#${first.id}`)),
    h("td", { class: "what" }, h("a", { class: "cut block", href: `#/jobs/${first.id}`, title: first.task }, first.task), h("span", { class: "muted cut block", title: args }, args)),
    h("td", { class: "status" }, status, progress.el, why), h("td", { class: "spare cut" }, first.queue), cell.attempt, cell.node, cell.created, cell.took);
  return {
    el,
    update(job) {
      check.checked = chosen.has(job.id);
      setPill(status, job.cancel_requested && job.status === "processing" ? "cancelling" : job.status);
      const error = ["failed", "queued", "cancelled"].includes(job.status) ? lastError(job) : "";
      const words = job.status === "processing" ? (job.stage ?? "") : error || (job.status === "queued" && job.run_at > now() ? `in ${span((job.run_at - now()) / 1000)}` : "");
      text(why, words);
      attr(why, "title", words || null);
      attr(why, "data-bad", job.status === "failed");
      progress.el.hidden = job.status !== "processing" || job.progress === null || job.progress === undefined;
      progress.update(job.progress);
      text(cell.attempt, job.attempt ? `${job.attempt} / ${job.attempts}` : "");
      attr(cell.attempt, "title", job.crashes ? `${job.crashes} ${job.crashes === 1 ? "crash" : "crashes"}` : null);
      text(cell.node, nodeLabel(job.node_id));
      cell.node.hidden = !several();
      text(cell.created, ago(job.created_at));
      attr(cell.created, "title", moment(job.created_at));
      text(cell.took, job.started_at ? span(((job.finished_at ?? now()) - job.started_at) / 1000) : "");
    },
  };
}

/** In words what went wrong last: also of a job that waits for its retry. */
function lastError(job) {
  return job.last_error ?? (job.error ? `${job.error.code}: ${job.error.message ?? ""}` : "");
}
