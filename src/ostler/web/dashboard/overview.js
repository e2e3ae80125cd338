// Is everything well, what is running, how has it been, and what happened last.
import { get, post } from "./api.js";
import { button, complaints } from "./actions.js";
import { attr, bar, h, keyed, pill, setPill, table, text } from "./dom.js";
import { ago, clock, count, eta, now, rate, since, span } from "./format.js";
import { plot, whole } from "./plots.js";
import { nodeLabel, several, state, workerLink } from "./state.js";

const BACK = { "10m": 600, "1h": 3600, "24h": 86400, "7d": 604800 };
const SHOWN = 12;

export function page() {
  const health = banner();
  const numbers = figures();
  const charts = plots();
  const queues = queueTable();
  const running = runningJobs();
  const incidents = incidentList();
  const el = h("div", {},
    h("h1", { class: "unseen" }, "Overview"),
    health.el, numbers.el, charts.el, queues.el, running.el, incidents.el);
  const parts = [health, numbers, queues, running, incidents];
  return {
    el,
    title: "Overview",
    update(changes) {
      for (const part of parts) part.update(changes);
      if (changes.has("queues") || changes.has("snapshot")) charts.take(changes.has("snapshot"));
    },
    tick() {
      for (const part of parts) part.update(new Set(["tick"]));
      charts.tick();
    },
  };
}

const HOUR = 3_600_000;

/** Jobs that failed for good within the last hour, by task and error: [{task, code, count}], as the incidents tell. */
function failing() {
  const found = new Map();
  for (const one of state.incidents.values()) {
    const [, task, code] = /^task:(.+):([^:]*)$/.exec(one.level === "error" ? one.subject : "") ?? [];
    if (!task || now() - one.at > HOUR) continue;
    const known = found.get(one.subject) ?? { task, code, count: 0 };
    found.set(one.subject, { ...known, count: known.count + one.count });
  }
  return [...found.values()].sort((a, b) => b.count - a.count);
}

function banner() {
  const word = h("strong");
  const mark = h("span", { class: "mark", "aria-hidden": "true" });
  const where = h("span", { class: "muted where" });
  const reasons = h("ul");
  const el = h("section", { class: "panel banner", "aria-label": "Health" }, mark, h("div", { class: "grow" }, h("p", { role: "status" }, word), reasons), where);
  const WORDS = { healthy: "Everything is running normally", failing: "Healthy, but some jobs failed in the last hour", paused: "All queues are paused", degraded: "Running, but something needs attention", error: "Something is not working" };
  const SIGNS = { healthy: "✓", failing: "!", paused: "Ⅱ", degraded: "!", error: "✕" };
  const reason = (one) => {
    const words = h("a");
    return typeof one === "string" ? { el: h("li", {}, linked(one)) } : { el: h("li", {}, words), update: (now_) => (text(words, now_.words), attr(words, "href", now_.href)) };
  };
  return {
    el,
    update() {
      const found = state.health;
      if (!found) return text(word, "Checking…");
      const fails = state.total?.failed ? failing() : [];
      const told = found.status !== "healthy" ? found.status : state.total?.paused ? "paused" : fails.length ? "failing" : "healthy";
      attr(el, "data-state", told === "failing" ? "degraded" : told);
      text(mark, SIGNS[told]);
      text(word, WORDS[told]);
      const alive = [...state.nodes.values()].filter((node) => node.alive).length;
      text(where, state.node ? `node ${state.node}, up ${since(state.started)}${several() ? `; ${alive} of ${state.nodes.size} nodes live` : ""}` : "");
      const lines = fails.slice(0, 3).map(({ task, code, count: n }) => ({
        key: `${task} ${code}`, words: `${count(n)} ${n === 1 ? "job" : "jobs"} of ${task} failed with ${code} in the last hour`, href: `#/jobs?${new URLSearchParams({ status: "failed", task, code })}`,
      }));
      const rest = fails.slice(3).reduce((sum, one) => sum + one.count, 0);
      if (rest) lines.push({ key: "rest", words: `${count(rest)} more failed jobs`, href: "#/jobs?status=failed" });
      if (!fails.length && state.total?.failed) lines.push({ key: "earlier", words: `${count(state.total.failed)} failed ${state.total.failed === 1 ? "job" : "jobs"} from earlier`, href: "#/jobs?status=failed" });
      keyed(reasons, [...found.errors, ...lines], (one) => one.key ?? one, reason);
      reasons.hidden = !found.errors.length && !lines.length;
    },
  };
}

function figures() {
  const make = (label, href) => {
    const value = h("strong");
    const more = h("span", { class: "muted" });
    return { value, more, el: h("a", { class: "panel figure", href }, h("span", {}, label), value, more) };
  };
  const running = make("Running", "#/jobs?status=processing");
  const waiting = make("Waiting", "#/jobs?status=queued");
  const done = make("Done", "#/jobs?status=done");
  const failed = make("Failed", "#/jobs?status=failed");
  const workers = make("Workers", "#/workers");
  const sessions = make("Sessions", "#/sessions");
  sessions.el.hidden = true;
  return {
    el: h("section", { class: "figures", "aria-label": "Now" }, [running, waiting, done, failed, workers, sessions].map((f) => f.el)),
    update() {
      const all = state.total;
      if (all) {
        text(running.value, count(all.running));
        text(running.more, all.avg_time === null ? "" : `${span(all.avg_time)} on average`);
        text(waiting.value, count(all.pending));
        const left = all.stuck ? `${count(all.stuck)} cannot run` : eta(all, state.said.get("queue:status"));
        const later = all.scheduled ? `${count(all.scheduled)} scheduled` : "";
        text(waiting.more, [left && all.pending ? ({ unknown: "no ETA", paused: "paused", "any moment": "almost empty" }[left] ?? (all.stuck ? left : `empty in ${left}`)) : "", later].filter(Boolean).join(", "));
        text(done.value, count(all.completed));
        const pace = rate(all.recent, state.before, now());
        text(done.more, pace ? `${whole(pace < 10 ? Math.round(pace * 10) / 10 : Math.round(pace))} per second` : "");
        text(failed.value, count(all.failed));
        const recent = failing().reduce((sum, one) => sum + one.count, 0);
        text(failed.more, all.failed ? (recent ? `${count(recent)} ${recent === 1 ? "failure" : "failures"} in the last hour` : "none in the last hour") : "");
        attr(failed.el, "data-bad", all.failed ? true : null);
      }
      const list = [...state.workers.values()].filter((w) => !w.idle);
      const well = list.filter((w) => w.status === "healthy").length;
      text(workers.value, list.length ? `${well} / ${list.length}` : "–");
      text(workers.more, well === list.length ? "all healthy" : "healthy");
      attr(workers.el, "data-bad", list.some((w) => ["failed", "crashed"].includes(w.status)) ? true : null);
      const pools = [...state.sessions.values()];
      const sum = (name) => pools.reduce((all, p) => all + p[name], 0);
      sessions.el.hidden = !pools.length;
      text(sessions.value, count(sum("in_use")));
      text(sessions.more, sum("waiting") ? `${count(sum("waiting"))} waiting` : `${count(sum("free"))} slots free`);
    },
  };
}

function plots() {
  const throughput = plot("Throughput", [
    { name: "done", key: "done", kind: "bar", class: "c-done" },
    { name: "failed", key: "failed", kind: "bar", class: "c-failed" },
  ], (value) => whole(value), "no job has ended in this time");
  const latency = plot("Latency", [
    { name: "run, median", key: "run_p50", kind: "line", class: "c-run" },
    { name: "run, 95 %", key: "run_p95", kind: "line", class: "c-run95" },
    { name: "wait, 95 %", key: "wait_p95", kind: "line", class: "c-wait" },
  ], (value) => span(value), "no job has run in this time");
  const spanSelect = h("select", { "aria-label": "Time span" }, Object.entries({ "10m": "last 10 minutes", "1h": "last hour", "24h": "last day", "7d": "last week" }).map(([v, words]) => h("option", { value: v }, words)));
  const queueSelect = h("select", { "aria-label": "Queue" }, h("option", { value: "" }, "all queues"));
  const errors = complaints();
  const el = h("section", { "aria-label": "Over time" }, h("div", { class: "row end tools" }, queueSelect, spanSelect), errors.el, h("div", { class: "two even" }, throughput.el, latency.el));
  let points = new Map();
  let step = 10;
  let back = 600;
  let loaded = 0;

  async function load() {
    loaded = Date.now();
    const queue = queueSelect.value ? `&queue=${encodeURIComponent(queueSelect.value)}` : "";
    try {
      const found = await get(`/stats?span=${spanSelect.value}${queue}`);
      points = new Map(found.points.map((p) => [p.at, p]));
      step = found.step;
      back = BACK[spanSelect.value];
      errors.clear();
      merge();
    } catch (error) {
      errors.say(`The plots could not be read: ${error.message}`);
    }
  }

  /** The newest bucket comes with the queue's own state, so the plot moves with the work. */
  function merge() {
    const fresh = queueSelect.value ? state.queues.get(queueSelect.value)?.recent : state.total?.recent;
    if (fresh && fresh.step === step) points.set(fresh.at, fresh);
    draw();
  }

  function draw() {
    const list = [...points.values()].filter((p) => p.done + p.failed + p.retried + p.crashed + p.cancelled > 0 || p.run_p50 !== null || p.wait_p95 !== null).sort((a, b) => a.at - b.at);
    throughput.update(list, back, step);
    latency.update(list, back, step);
  }

  spanSelect.onchange = queueSelect.onchange = load;
  return {
    el,
    take(whole_) {
      for (const name of [...state.queues.keys()].sort()) {
        if (![...queueSelect.options].some((o) => o.value === name)) queueSelect.append(h("option", { value: name }, name));
      }
      // Wider buckets are not told as they grow: read them again now and then, while something happens.
      if (whole_ || (step !== 10 && Date.now() - loaded > 30_000)) load();
      else if (step === 10) merge();
    },
    tick: draw,
  };
}

const number = (name, spare = "") => ({ name, class: `number ${spare}` });

function queueTable() {
  const errors = complaints();
  const list = table("queues", ["Queue", number("Waiting"), number("Scheduled", "spare"), number("Running"), number("Done", "spare"), number("Failed"), number("Average", "spare"), number("Empty in", "spare"), ""], "Queues");
  const none = h("p", { class: "muted", hidden: true }, "No queues yet. A queue appears with the first job that names it.");
  const el = h("section", { class: "panel", "aria-label": "Queues" }, h("h2", {}, "Queues"), errors.el, none, list.el);
  return {
    el,
    update(changes) {
      if (!["queues", "snapshot", "tick", "workers"].some((c) => changes.has(c))) return;
      none.hidden = state.queues.size > 0 || !state.epoch;
      list.el.hidden = !none.hidden;
      keyed(list.body, [...state.queues.values()].sort((a, b) => (a.queue < b.queue ? -1 : 1)), (q) => q.queue, (q) => queueRow(q, errors));
    },
  };
}

function queueRow(first, errors) {
  const name = first.queue;
  const cell = Object.fromEntries(["pending", "scheduled", "running", "completed", "failed", "average", "eta"].map((key) => [key, h("td", { class: ["pending", "running", "failed"].includes(key) ? "number" : "number spare" })]));
  const flag = pill("paused");
  const failed = h("a", { href: `#/jobs?${new URLSearchParams({ status: "failed", queue: name })}` });
  cell.failed.append(failed);
  const toggle = (verb, words) => button(words, () => post(`/pools/${encodeURIComponent(name)}/${verb}`), { errors, kind: "small", done: `queue ${name} ${verb}d` });
  const pause = toggle("pause", "Pause");
  const resume = toggle("resume", "Resume");
  attr(pause, "aria-label", `Pause queue ${name}`);
  attr(resume, "aria-label", `Resume queue ${name}`);
  const el = h("tr", {}, h("th", { scope: "row" }, h("a", { href: `#/jobs?queue=${encodeURIComponent(name)}` }, name), " ", flag), Object.values(cell), h("td", { class: "act" }, pause, resume));
  return {
    el,
    update(q) {
      const problem = q.paused || !q.pending ? "" : !q.workers ? "no worker" : q.stuck ? "no task" : "";
      const shown = { pending: count(q.pending), scheduled: count(q.scheduled), running: count(q.running), completed: count(q.completed), average: span(q.avg_time), eta: problem ? "never" : eta(q, state.said.get(`queue:${q.queue}:status`)) };
      for (const [key, words] of Object.entries(shown)) {
        text(cell[key], words);
        cell[key].classList.toggle("zero", words === "0");
      }
      text(failed, count(q.failed));
      attr(failed, "class", q.failed ? "bad" : "zero");
      cell.eta.classList.toggle("bad", Boolean(problem));
      setPill(flag, q.paused ? "paused" : problem);
      flag.hidden = !q.paused && !problem;
      pause.hidden = q.paused;
      resume.hidden = !q.paused;
    },
  };
}

function runningJobs() {
  const list = h("ul", { class: "plain rows" });
  const more = h("p", { class: "muted" });
  const el = h("section", { class: "panel", "aria-label": "Running jobs" }, h("h2", {}, "Running now"), list, more);
  return {
    el,
    update(changes) {
      if (!["jobs", "snapshot", "tick"].some((c) => changes.has(c))) return;
      const jobs = [...state.jobs.values()].filter((job) => job.status === "processing").sort((a, b) => a.id - b.id);
      keyed(list, jobs.slice(0, SHOWN), (job) => job.id, jobLine);
      const hidden = (state.total?.running ?? jobs.length) - Math.min(jobs.length, SHOWN);
      more.hidden = jobs.length > 0 && hidden <= 0;
      text(more, !jobs.length ? "No job is running." : hidden > 0 ? `and ${count(hidden)} more` : "");
    },
  };
}

function jobLine(first) {
  const progress = bar(`Progress of job ${first.id}`);
  const node = h("span", { class: "muted" });
  const what = h("span", { class: "grow cut" });
  const age = h("span", { class: "muted age" });
  return {
    el: h("li", { class: "row" }, h("a", { href: `#/jobs/${first.id}` }, `#${first.id}`), h("span", {}, first.task), node, what, progress.el, age),
    update(job) {
      text(node, nodeLabel(job.node_id));
      node.hidden = !several();
      text(what, job.stage ?? "");
      progress.el.hidden = job.progress === null;
      progress.update(job.progress);
      text(age, since(job.started_at));
    },
  };
}

const FEW = 8; // incidents before somebody asks for more

function incidentList() {
  const list = h("ol", { class: "plain incidents" });
  const more = h("button", { type: "button", class: "small" });
  const none = h("p", { class: "muted", hidden: true }, "Nothing so far.");
  const el = h("section", { class: "panel", "aria-label": "Incidents" }, h("h2", {}, "What happened"), none, list, more);
  let whole_ = false;
  more.onclick = () => {
    whole_ = !whole_;
    draw();
  };
  function draw() {
    const all = [...state.incidents.values()].sort((a, b) => b.at - a.at);
    keyed(list, whole_ ? all : all.slice(0, FEW), (i) => `${i.node}-${i.id}`, incidentLine);
    none.hidden = all.length > 0;
    more.hidden = all.length <= FEW;
    text(more, whole_ ? "Show fewer" : `Show all ${all.length}`);
  }
  return { el, update: (changes) => ["incidents", "snapshot", "tick"].some((c) => changes.has(c)) && draw() };
}

function incidentLine(first) {
  const time = h("time");
  const words = h("span");
  const detail = h("span", { class: "muted block" });
  const node = h("span", { class: "muted small" });
  let shown = null;
  return {
    el: h("li", { "data-level": first.level }, h("span", { class: "unseen" }, `${first.level}: `), time, h("p", { class: "grow" }, words, detail), node),
    update(incident) {
      attr(time, "datetime", new Date(incident.at).toISOString());
      attr(time, "title", clock(incident.at));
      text(time, ago(incident.at));
      if (shown !== incident.text) {
        shown = incident.text;
        words.replaceChildren(...linked(incident.text, several() ? incident.node : null));
      }
      text(node, incident.node);
      node.hidden = !several();
      text(detail, incident.detail ?? "");
      detail.hidden = !incident.detail;
    },
  };
}

/** Words with the workers, jobs and sessions in them as links; `node` is the one that said them. */
export function linked(words, node = null) {
  return words.split(/((?:[\w.@-]+\/)?worker:[\w.-]+:\d+|job \d+|session [0-9a-f]{20}\b)/).map((part) => {
    if (part.includes("worker:")) return h("a", { href: workerLink(node && !part.includes("/") ? `${node}/${part}` : part) }, part);
    if (/^session [0-9a-f]{20}$/.test(part)) return h("a", { href: `#/sessions/${part.slice(8)}` }, part);
    if (/^job \d+$/.test(part)) return h("a", { href: `#/jobs/${part.slice(4)}` }, part);
    return part;
  });
}
