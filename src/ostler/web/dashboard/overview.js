// Is everything well, what is running, how has it been, and what happened last.
import { get, post } from "./api.js";
import { button, complaints } from "./actions.js";
import { attr, bar, h, keyed, pill, setPill, text } from "./dom.js";
import { ago, clock, count, eta, now, rate, since, span } from "./format.js";
import { plot, whole } from "./plots.js";
import { nodeLabel, several, state, workerLink } from "./state.js";

const BACK = { "10m": 600, "1h": 3600, "24h": 86400, "7d": 604800 };
const SHOWN = 12;

export function page() {
  const stop = [];
  const health = banner();
  const numbers = figures();
  const charts = plots();
  const queues = queueTable();
  const running = runningJobs();
  const incidents = incidentList();
  const el = h("div", {},
    h("h1", { class: "unseen" }, "Overview"),
    health.el, numbers.el, charts.el,
    h("div", { class: "two" }, h("div", {}, queues.el, running.el), incidents.el));
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
    close: () => stop.forEach((f) => f()),
  };
}

function banner() {
  const word = h("strong");
  const mark = h("span", { class: "mark", "aria-hidden": "true" });
  const where = h("span", { class: "muted" });
  const reasons = h("ul");
  const el = h("section", { class: "panel banner", "aria-label": "Health" }, mark, h("div", { class: "grow" }, h("p", { role: "status" }, word), reasons), where);
  const WORDS = { healthy: "Everything is well", degraded: "Working, but something is wrong", error: "Something cannot work" };
  const MARKS = { healthy: "✓", degraded: "!", error: "✕" };
  return {
    el,
    update() {
      const found = state.health;
      if (!found) return text(word, "Looking…");
      const paused = state.total?.paused;
      attr(el, "data-state", found.status === "healthy" && paused ? "paused" : found.status);
      text(mark, paused && found.status === "healthy" ? "Ⅱ" : MARKS[found.status]);
      text(word, found.status === "healthy" && paused ? "All queues are paused" : WORDS[found.status]);
      const alive = [...state.nodes.values()].filter((node) => node.alive).length;
      text(where, state.node ? `node ${state.node}, up ${since(state.started)}${several() ? `; ${alive} of ${state.nodes.size} nodes live` : ""}` : "");
      keyed(reasons, found.errors, (words) => words, (words) => ({ el: h("li", {}, linked(words)) }));
      reasons.hidden = !found.errors.length;
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
  const done = make("Done so far", "#/jobs?status=done");
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
        const left = eta(all, state.said.get("queue:status"));
        const later = all.scheduled ? `${count(all.scheduled)} for later` : "";
        text(waiting.more, [left && all.pending ? ({ unknown: "ETA unknown", paused: "paused", "any moment": "empty any moment" }[left] ?? `empty in ${left}`) : "", later].filter(Boolean).join(", "));
        text(done.value, count(all.completed));
        const pace = rate(all.recent, state.before, now());
        text(done.more, pace ? `${whole(pace)} per second` : "");
        text(failed.value, count(all.failed));
        text(failed.more, all.failed ? "look at them" : "none to look at");
        attr(failed.el, "data-bad", all.failed ? true : null);
      }
      const list = [...state.workers.values()];
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

function queueTable() {
  const body = h("tbody");
  const errors = complaints();
  const el = h("section", { class: "panel", "aria-label": "Queues" }, h("h2", {}, "Queues"), errors.el,
    h("div", { class: "scroll" }, h("table", { class: "numbers queues" },
      h("thead", {}, h("tr", {}, ["Queue", "Waiting", "Later", "Running", "Done", "Failed", "Average", "Empty in", ""].map((t) => h("th", { scope: "col" }, t)))), body)));
  return {
    el,
    update(changes) {
      if (!["queues", "snapshot", "tick", "workers"].some((c) => changes.has(c))) return;
      keyed(body, [...state.queues.values()].sort((a, b) => (a.queue < b.queue ? -1 : 1)), (q) => q.queue, (q) => queueRow(q, errors));
    },
  };
}

function queueRow(first, errors) {
  const name = first.queue;
  const cells = Array.from({ length: 7 }, () => h("td"));
  const flag = h("span", { class: "pill", "data-state": "paused" }, "paused");
  const toggle = (verb, words) => button(words, () => post(`/pools/${encodeURIComponent(name)}/${verb}`), { errors, kind: "small", done: `queue ${name} ${verb}d` });
  const pause = toggle("pause", "Pause");
  const resume = toggle("resume", "Resume");
  attr(pause, "aria-label", `Pause queue ${name}`);
  attr(resume, "aria-label", `Resume queue ${name}`);
  const el = h("tr", {}, h("th", { scope: "row" }, h("a", { href: `#/jobs?queue=${encodeURIComponent(name)}` }, name), " ", flag), cells, h("td", { class: "act" }, pause, resume));
  return {
    el,
    update(q) {
      [count(q.pending), count(q.scheduled), count(q.running), count(q.completed), count(q.failed), span(q.avg_time), eta(q, state.said.get(`queue:${q.queue}:status`))].forEach((v, i) => text(cells[i], v));
      attr(cells[4], "class", q.failed ? "bad" : null);
      flag.hidden = !q.paused;
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
      text(more, !jobs.length ? "Nothing runs." : hidden > 0 ? `and ${count(hidden)} more` : "");
    },
  };
}

function jobLine(first) {
  const progress = bar(`Progress of job ${first.id}`);
  const node = h("span", { class: "muted" });
  const what = h("span", { class: "grow cut" });
  const age = h("span", { class: "muted" });
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

function incidentList() {
  const list = h("ol", { class: "plain incidents" });
  const el = h("section", { class: "panel", "aria-label": "Incidents" }, h("h2", {}, "What happened"), list);
  return {
    el,
    update(changes) {
      if (!["incidents", "snapshot", "tick"].some((c) => changes.has(c))) return;
      const all = [...state.incidents.values()].sort((a, b) => b.at - a.at).slice(0, 30);
      keyed(list, all, (i) => `${i.node}-${i.id}`, incidentLine);
    },
  };
}

function incidentLine(first) {
  const time = h("time");
  const words = h("p");
  const detail = h("p", { class: "muted" });
  const node = h("span", { class: "muted small" });
  let shown = null;
  return {
    el: h("li", { "data-level": first.level }, h("span", { class: "unseen" }, `${first.level}: `), time, h("div", { class: "grow" }, words, detail), node),
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
