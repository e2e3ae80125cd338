// Models and calls: the state of each model, memory, calls under way, plots, the log of calls, and a form to try one.
import { get } from "./api.js";
import { complaints } from "./actions.js";
import { attr, facts, fill, h, keyed, setPill, text } from "./dom.js";
import { count, megabytes, span } from "./format.js";
import { callLog, runningCalls } from "./calllog.js";
import { tail } from "./logs.js";
import { memoryBars } from "./memory.js";
import { plot, whole } from "./plots.js";
import { modelLink, state, workerLink } from "./state.js";
import { tryIt } from "./tryit.js";

const AGAIN = 2000; // ms between two readings of what the stream does not tell: memory, counters, environments
const BACK = 600; // seconds that the plots go back

export function page(name, query) {
  const [task, ...rest] = name ? name.split("/") : [];
  const of = name ? { task, model: rest.join("/") } : null;
  const errors = complaints();
  const models = of ? oneModel(of) : modelTable();
  const memory = memoryBars();
  const charts = plots(of);
  const running = runningCalls(of, errors);
  const log = callLog(of, query);
  const envs = of ? null : environments();
  const form = tryIt(of);
  const title = of ? `${of.task} ${of.model}` : "Models";
  const heading = of ? h("h1", {}, h("a", { href: "#/calls" }, "Models"), " / ", of.task, " ", h("span", { class: "wraps" }, of.model), " ", models.status) : h("h1", {}, "Models");
  const el = h("div", {}, heading, errors.el, models.el,
    of ? null : memory.el, charts.el, running.el, of ? models.log : null, form.el, log.el, envs?.el);
  let timer = 0;
  let closed = false;

  async function load() {
    clearTimeout(timer);
    if (!document.hidden) await look();
    if (!closed) timer = setTimeout(load, AGAIN);
  }

  async function look() {
    try {
      const [found, held] = await Promise.all([get("/models/stats"), get("/memory"), charts.load(), running.load(), log.look(), envs?.load()]);
      errors.clear();
      memory.update(held);
      models.update(found.models);
      form.update(found.models, found.tasks);
    } catch (error) {
      errors.say(`The models could not be read: ${error.message}`);
    }
  }
  load();
  if (query.has("try")) requestAnimationFrame(() => form.focus());
  return {
    el,
    title,
    update(changes) {
      if (!changes.has("calls") && !changes.has("snapshot")) return;
      models.live();
      running.load();
    },
    tick: () => charts.tick(),
    focus: () => log.focus(),
    close() {
      closed = true;
      clearTimeout(timer);
      models.close?.();
      form.close();
    },
  };
}

/** What the stream says of a model is newer than what was read. */
function newest(model) {
  return { ...model, ...(state.calls.get(`${model.task}\n${model.model}`) ?? {}) };
}

const failures = (calls) => Object.entries(calls).reduce((sum, [outcome, n]) => sum + (["error", "died", "deadline"].includes(outcome) ? n : 0), 0);

function modelTable() {
  const body = h("tbody");
  const none = h("p", { class: "muted", hidden: true }, "This node serves no models. A model is a class with load and infer, declared with @app.model.");
  const table = h("div", { class: "scroll" }, h("table", { class: "cards models" },
    h("thead", {}, h("tr", {}, ["Model", "State", "In flight", "Waiting", "Memory", "Answered", "Failed", "Loads", "Worker", ""].map((t, i) => h("th", { scope: "col", class: i > 1 && i < 8 ? "number" : null }, t)))), body));
  let known = [];
  const draw = () => keyed(body, known.map(newest), (m) => `${m.task}\n${m.model}`, modelRow);
  return {
    el: h("section", { class: "panel", "aria-label": "Models" }, none, table),
    update(models) {
      known = models.sort((a, b) => (a.task < b.task ? -1 : a.task > b.task ? 1 : 0));
      none.hidden = known.length > 0;
      table.hidden = !none.hidden;
      draw();
    },
    live: draw,
  };
}

function modelRow(first) {
  const status = h("span", { class: "pill" });
  const reason = h("span", { class: "muted wraps reason" });
  const worker = h("a");
  const cell = Object.fromEntries(["flight", "waiting", "memory", "done", "failed", "loads"].map((key) => [key, h("td", { class: ["done", "failed", "loads"].includes(key) ? "number spare" : "number", "data-unit": { flight: "in flight", waiting: "waiting" }[key] })]));
  const use = h("a", { class: "button small", href: `${modelLink(first.task, first.model)}?try=1`, "aria-label": `Try ${first.task} ${first.model}` }, "Try it");
  const name = h("a", { href: modelLink(first.task, first.model), class: "wraps" }, first.model === first.task ? first.task : `${first.task} · ${first.model}`);
  const el = h("tr", {}, h("th", { scope: "row", class: "name" }, name), h("td", { class: "state" }, status, reason),
    cell.flight, cell.waiting, cell.memory, cell.done, cell.failed, cell.loads, h("td", { class: "spare" }, worker), h("td", { class: "act" }, use));
  return {
    el,
    update(m) {
      setPill(status, m.state.toLowerCase());
      text(reason, m.reason ?? "");
      reason.hidden = !m.reason;
      text(cell.flight, m.in_flight || "");
      text(cell.waiting, m.waiting || "");
      text(cell.memory, megabytes(m.memory_mb));
      text(cell.done, count(m.calls.done));
      text(cell.failed, failures(m.calls) || "");
      attr(cell.failed, "class", failures(m.calls) ? "number spare bad" : "number spare");
      text(cell.loads, count(m.loads));
      text(worker, m.worker ?? "");
      attr(worker, "href", m.worker ? workerLink(m.worker) : null);
    },
  };
}

/** One model: its facts, and what its worker prints. */
function oneModel(of) {
  const status = h("span", { class: "pill" });
  const known = facts();
  const reason = h("p", { class: "error soft", hidden: true });
  const none = h("p", { class: "muted" }, "Not loaded yet: there is no output.");
  const output = h("div", {}, none);
  const log = h("section", { class: "panel", "aria-label": "Output" }, h("h2", {}, "Output of its worker"), output);
  let following = null;
  let follows = "";
  let last = null;

  function draw() {
    if (!last) return;
    const m = newest(last);
    setPill(status, m.state.toLowerCase());
    text(reason, m.reason ?? "");
    reason.hidden = !m.reason;
    known.update(Object.entries({
      "In flight": m.in_flight, Waiting: m.waiting, Memory: megabytes(m.memory_mb) || "–", Answered: count(m.calls.done), Failed: failures(m.calls), Refused: m.calls.refused ?? 0,
      Loads: m.loads, Evictions: m.evictions, Idle: last.idle_seconds === null ? "–" : span(last.idle_seconds),
    }));
    if (m.worker && m.worker !== follows) {
      follows = m.worker;
      following?.close();
      following = tail(`/api/v1/workers/${encodeURIComponent(m.worker)}/logs/follow`, `Output of ${m.worker}`);
      fill(output, h("p", {}, h("a", { href: workerLink(m.worker) }, m.worker)), following.el);
    }
  }
  return {
    el: h("section", { class: "panel", "aria-label": "Model" }, reason, known.el),
    status,
    log,
    update(models) {
      last = models.find((m) => m.task === of.task && m.model === of.model) ?? null;
      if (last) return draw();
      setPill(status, "idle");
      text(reason, `This node has no model ${of.model} of ${of.task} loaded or listed.`);
      reason.hidden = false;
    },
    live: draw,
    close: () => following?.close(),
  };
}

function plots(of) {
  const ended = plot("Calls", [
    { name: "done", key: "done", kind: "bar", class: "c-done" },
    { name: "failed", key: "failed", kind: "bar", class: "c-failed" },
    { name: "refused", key: "refused", kind: "bar", class: "c-refused" },
  ], (value) => whole(value), "no call has ended in this time", "calls");
  const latency = plot("Latency", [
    { name: "median", key: "took_p50", kind: "line", class: "c-run" },
    { name: "95 %", key: "took_p95", kind: "line", class: "c-run95" },
    { name: "queued, 95 %", key: "waited_p95", kind: "line", class: "c-wait" },
  ], (value) => span(value), "no call has run in this time");
  const queue = plot("Queue", [
    { name: "in flight", key: "in_flight", kind: "bar", class: "c-flight" },
    { name: "waiting", key: "waiting", kind: "bar", class: "c-waiting" },
  ], (value) => whole(value), "no call was running in this time", "most at once");
  const query = of ? `?${new URLSearchParams(of)}` : "";
  return {
    el: h("section", { class: "three", "aria-label": "The last ten minutes" }, ended.el, latency.el, queue.el),
    async load() {
      const { points } = await get(`/models/series${query}`);
      for (const p of points) p.failed = p.error + p.died + p.deadline;
      ended.update(points.filter((p) => p.done + p.failed + p.refused), BACK, 10);
      latency.update(points.filter((p) => p.took_p50 !== null), BACK, 10);
      queue.update(points.filter((p) => p.in_flight + p.waiting), BACK, 10);
    },
    tick() {
      for (const one of [ended, latency, queue]) one.redraw();
    },
  };
}

function environments() {
  const body = h("tbody");
  const el = h("section", { class: "panel", "aria-label": "Environments", hidden: true }, h("h2", {}, "Environments"),
    h("div", { class: "scroll" }, h("table", { class: "cards" },
      h("thead", {}, h("tr", {}, ["Environment", "State", "Python", "", "Build it with"].map((t) => h("th", { scope: "col" }, t)))), body)));
  return {
    el,
    async load() {
      const { envs } = await get("/envs");
      el.hidden = !envs.length;
      keyed(body, envs, (env) => env.name, (first) => {
        const status = h("span", { class: "pill" });
        const [python, reason, command] = [h("td", { class: "spare" }), h("td", { class: "wraps reason" }), h("code", { class: "wraps" })];
        return {
          el: h("tr", {}, h("th", { scope: "row" }, first.name), h("td", {}, status), python, reason, h("td", {}, command)),
          update(env) {
            setPill(status, env.state);
            text(python, env.python ?? "");
            text(reason, env.reason ?? (env.state === "failed" ? env.tail.at(-1) : "") ?? "");
            text(command, env.state === "ready" ? "" : env.command);
          },
        };
      });
    },
  };
}
