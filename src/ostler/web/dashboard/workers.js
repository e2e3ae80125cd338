// Every pool and worker: what it is at, what it can be told to do, how it ended before, and what it prints.
import { get, post } from "./api.js";
import { button, complaints } from "./actions.js";
import { attr, bar, fill, h, keyed, setPill, text } from "./dom.js";
import { ago, megabytes, moment, now, since, span } from "./format.js";
import { tail } from "./logs.js";
import { findWorker, several, state, workerLink } from "./state.js";

const VERBS = {
  drain: { label: "Drain", words: "It finishes what it has, exits, and stays stopped until it is restarted or its pool resumed.", danger: false },
  restart: { label: "Restart", words: "It finishes what it has and is started anew. Its crashes are forgotten.", danger: false },
  reset: { label: "Reset", words: "Its crashes are forgotten. A failed worker becomes stopped and can be started again.", danger: false },
  kill: { label: "Kill", words: "SIGKILL, now. The job that it is at counts a crash and is run again, unless it has crashed too often." },
};

/** Which verbs make sense in a state. */
function allowed(status) {
  return {
    drain: ["starting", "healthy", "crashed"].includes(status),
    restart: true,
    reset: true,
    kill: ["starting", "healthy", "draining", "stopping"].includes(status),
  };
}

export function page(name) {
  const errors = complaints();
  const pools = h("div");
  const all = (verb, label, words) => button(label, () => post(`/workers/${verb}`), { errors, ask: words && { title: `${label}?`, words, danger: false }, done: `all pools ${verb}d` });
  const el = h("div", {},
    h("div", { class: "row between wrap" }, h("h1", {}, "Workers"),
      h("div", { class: "row" }, all("pause", "Pause all", "All workers stay alive, finish what they have, and take nothing new."), all("resume", "Resume all"))),
    errors.el, pools);
  let detail = null;
  if (name) {
    detail = one(name);
    pools.before(detail.el);
  }
  return {
    el,
    title: name ?? "Workers",
    update() {
      const found = new Map();
      for (const worker of state.workers.values()) found.set(worker.pool, [...(found.get(worker.pool) ?? []), worker]);
      keyed(pools, [...found].sort((a, b) => (a[0] < b[0] ? -1 : 1)), ([name]) => name, ([name]) => pool(name));
      if (!found.size && state.connection === "live" && state.epoch) fill(pools, h("p", { class: "panel muted" }, "There are no workers."));
      detail?.update();
    },
    tick() {
      this.update();
    },
    close: () => detail?.close(),
  };
}

function pool(name) {
  const errors = complaints();
  const flag = h("span", { class: "pill", "data-state": "paused" }, "paused");
  const load = h("span", { class: "muted" });
  const verb = (what, label) => button(label, () => post(`/pools/${encodeURIComponent(name)}/${what}`), { errors, kind: "small", done: `pool ${name} ${what}d` });
  const pause = verb("pause", "Pause");
  const resume = verb("resume", "Resume");
  attr(pause, "aria-label", `Pause pool ${name}`);
  attr(resume, "aria-label", `Resume pool ${name}`);
  const where = h("th", { scope: "col", class: "node" }, "Node");
  const body = h("tbody");
  const el = h("section", { class: "panel", "aria-label": `Pool ${name}` },
    h("div", { class: "row between" }, h("h2", {}, name, " ", flag, " ", load), h("div", { class: "row" }, pause, resume)),
    errors.el,
    h("div", { class: "scroll" }, h("table", { class: "cards" },
      h("thead", {}, h("tr", {}, where, ["Worker", "State", "Pid", "Age", "Memory", "At work on", "Crashes", "Last end", ""].map((t) => h("th", { scope: "col" }, t)))), body)));
  return {
    el,
    update([, workers]) {
      const paused = workers.every((w) => w.paused);
      where.hidden = !several();
      flag.hidden = !paused;
      pause.hidden = paused;
      resume.hidden = !paused;
      const busy = workers.filter((w) => w.current_job).length;
      text(load, `${workers.length} ${workers.length === 1 ? "worker" : "workers"}${busy ? `, ${busy} busy` : ""}`);
      keyed(body, workers.sort((a, b) => (a.node < b.node ? -1 : a.node > b.node ? 1 : a.id - b.id)), (w) => `${w.node_id}/${w.component}`, row);
    },
  };
}

function row(first) {
  const cell = Object.fromEntries(["pid", "age", "memory", "crashes", "end"].map((name) => [name, h("td", { class: name === "memory" ? null : "spare" })]));
  const status = h("span", { class: "pill" });
  const note = h("span", { class: "muted" });
  const job = h("a");
  const progress = bar(`Progress of the job of ${first.component}`);
  const work = h("td", { class: "work" }, job, progress.el);
  const more = h("a", { class: "button small" }, "Details");
  const name = h("a");
  const node = h("td", { class: "node" });
  const el = h("tr", { id: first.component }, node, h("th", { scope: "row" }, name), h("td", {}, status, " ", note),
    cell.pid, cell.age, cell.memory, work, cell.crashes, cell.end, h("td", { class: "act" }, more));
  return {
    el,
    update(w) {
      for (const link of [name, more]) attr(link, "href", workerLink(w.name));
      attr(more, "aria-label", `Details of ${w.name}`);
      text(name, w.component);
      text(node, w.node);
      node.hidden = !several();
      setPill(status, w.status);
      text(note, w.restart_at ? `again in ${span(Math.max(0, (w.restart_at - now()) / 1000))}` : "");
      text(cell.pid, w.pid ?? "");
      text(cell.age, since(w.started_at));
      text(cell.memory, megabytes(w.rss_mb));
      text(cell.crashes, w.restart_count);
      attr(cell.crashes, "class", w.restart_count ? "spare bad" : "spare");
      text(cell.end, w.last_exit ? `${w.last_exit.text} (${ago(w.last_exit.at)})` : "");
      const holds = w.item === "" && w.task; // a worker of sessions says how many it has
      text(job, w.current_job ? `#${w.current_job} ${w.task}` : holds || "");
      attr(job, "href", w.current_job ? `#/jobs/${w.current_job}` : "#/sessions");
      job.hidden = !w.current_job && !holds;
      const known = state.jobs.get(w.current_job);
      progress.el.hidden = !w.current_job || known?.progress === null || !known;
      progress.update(known?.progress ?? null);
    },
  };
}

/** One worker: what it can be told, its ends, its output. */
function one(name) {
  const errors = complaints();
  const status = h("span", { class: "pill" });
  const facts = h("p", { class: "muted" });
  const buttons = {};
  for (const [verb, { label, words, danger }] of Object.entries(VERBS)) {
    buttons[verb] = button(label, async () => (await post(`/workers/${encodeURIComponent(name)}/${verb}`)).message, {
      errors,
      kind: verb === "kill" ? "danger" : "",
      ask: { title: `${label} ${name}?`, words, verb: label, danger: danger ?? true },
      done: `${name}: ${verb}`,
    });
  }
  const body = h("tbody");
  const none = h("p", { class: "muted" }, "It has never ended.");
  const ends = h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["When", "Generation", "Kind", "How", "Job", "Peak memory", "Last line"].map((t) => h("th", { scope: "col" }, t)))), body));
  const log = tail(`/api/v1/workers/${encodeURIComponent(name)}/logs/follow`, `Output of ${name}`);
  const el = h("section", { class: "panel", "aria-label": name, id: "detail" },
    h("div", { class: "row between wrap" }, h("h2", {}, name, " ", status), h("div", { class: "row wrap" }, Object.values(buttons), h("a", { class: "button", href: "#/workers" }, "Close"))),
    facts, errors.el,
    h("h3", {}, "Output"), log.el,
    h("h3", {}, "How it ended before"), none, ends);
  let seen = "";

  async function history() {
    try {
      const found = await get(`/workers/${encodeURIComponent(name)}`);
      none.hidden = found.exits.length > 0;
      ends.hidden = !none.hidden;
      keyed(body, found.exits, (e) => `${e.generation}-${e.at}`, (e) => ({
        el: h("tr", {}, h("td", { title: moment(e.at) }, ago(e.at)), h("td", {}, String(e.generation)), h("td", {}, e.kind === "crash" && !e.counted ? "crash, not counted" : e.kind), h("td", {}, e.text),
          h("td", {}, e.item?.startsWith("job:") ? h("a", { href: `#/jobs/${e.item.slice(4)}` }, `#${e.item.slice(4)}`) : (e.item ?? "")), h("td", {}, megabytes(e.peak_rss_mb)), h("td", { class: "cut" }, e.log.filter((l) => l.trim()).at(-1) ?? "")),
      }));
    } catch (error) {
      errors.say(error.message);
    }
  }
  return {
    el,
    update() {
      const w = findWorker(name);
      if (!w) {
        const same = [...state.workers.values()].filter((other) => other.component === name);
        if (state.epoch) fill(facts, same.length ? ["Several nodes have it: ", same.map((other) => [h("a", { href: workerLink(other.name) }, other.name), " "])] : `There is no worker ${name}.`);
        return;
      }
      setPill(status, w.status);
      const parts = [several() && `node ${w.node}`, w.pid && `pid ${w.pid}`, `generation ${w.generation}`, w.started_at && `started ${moment(w.started_at)}`, megabytes(w.rss_mb), w.current_job && `at job ${w.current_job} (${w.task})`, w.paused && "paused"];
      text(facts, parts.filter(Boolean).join(" · "));
      for (const [verb, possible] of Object.entries(allowed(w.status))) if (!buttons[verb].hasAttribute("aria-busy")) buttons[verb].disabled = !possible;
      const mark = `${w.generation} ${w.status} ${w.last_exit?.at}`;
      if (mark !== seen) {
        seen = mark;
        history();
      }
    },
    close: () => log.close(),
  };
}
