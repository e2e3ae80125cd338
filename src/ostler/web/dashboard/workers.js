// Every pool and worker: what it works on, what it can be told to do, how it exited before, and what it prints.
import { get, post } from "./api.js";
import { button, complaints } from "./actions.js";
import { attr, bar, fill, h, keyed, pill, setPill, table, text } from "./dom.js";
import { ago, megabytes, moment, now, since, span } from "./format.js";
import { tail } from "./logs.js";
import { findWorker, modelLink, several, state, workerLink } from "./state.js";

const VERBS = {
  drain: { label: "Drain", words: "It finishes its current job, exits, and stays stopped until it is restarted or its pool is resumed.", danger: false },
  restart: { label: "Restart", words: "It finishes its current job, then a new process is started. Its crash count is cleared.", danger: false },
  reset: { label: "Reset", words: "Its crash count is cleared. A failed worker becomes stopped and can be started again.", danger: false },
  kill: { label: "Kill", words: "It is killed with SIGKILL now. Its current job is charged with a crash and runs again, unless it has crashed too often." },
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

const COLUMNS = [{ name: "Node", class: "node" }, "Worker", "State", { name: "Pid", class: "number" }, { name: "Age", class: "number" }, { name: "Memory", class: "number" }, "Working on", { name: "Crashes", class: "number" }, "Last exit", ""];

export function page(name) {
  const errors = complaints();
  const all = (verb, label, words) => button(label, () => post(`/workers/${verb}`), { errors, ask: words && { title: `${label}?`, words, danger: false }, done: `all pools ${verb}d` });
  const list = table("cards workers", COLUMNS, "Workers");
  const body = list.body.parentElement;
  list.body.remove(); // each pool has a body of its own, so that the columns of all line up
  const none = h("p", { class: "muted", hidden: true }, "There are no workers.");
  const detail = name ? one(name) : null;
  const el = h("div", {},
    h("div", { class: "row between wrap" }, h("h1", {}, "Workers"),
      h("div", { class: "row" }, all("pause", "Pause all", "All workers stay alive, finish the job they have, and take nothing new."), all("resume", "Resume all"))),
    errors.el, detail?.el, h("section", { class: "panel", "aria-label": "Pools" }, none, list.el));
  return {
    el,
    title: name ?? "Workers",
    update() {
      const found = Map.groupBy(state.workers.values(), (worker) => worker.pool);
      list.cells[0].hidden = !several();
      keyed(body, [...found].sort((a, b) => (a[0] < b[0] ? -1 : 1)), ([pool]) => pool, ([pool]) => group(pool, errors), list.head);
      none.hidden = found.size > 0 || state.connection !== "live" || !state.epoch;
      list.el.hidden = !none.hidden;
      detail?.update();
    },
    tick() {
      this.update();
    },
    close: () => detail?.close(),
  };
}

/** A pool and its workers: a part of the one table. */
function group(name, errors) {
  const flag = pill("paused");
  const load = h("span", { class: "muted" });
  const verb = (what, label) => button(label, () => post(`/pools/${encodeURIComponent(name)}/${what}`), { errors, kind: "small", done: `pool ${name} ${what}d` });
  const pause = verb("pause", "Pause");
  const resume = verb("resume", "Resume");
  attr(pause, "aria-label", `Pause pool ${name}`);
  attr(resume, "aria-label", `Resume pool ${name}`);
  const title = h("th", { scope: "colgroup" }, h("h2", {}, name, " ", flag, " ", load));
  const head = h("tr", { class: "group" }, title, h("td", { class: "act" }, pause, resume));
  const el = h("tbody", { "aria-label": `Pool ${name}` }, head);
  return {
    el,
    update([, workers]) {
      const paused = workers.every((w) => w.paused);
      attr(title, "colspan", COLUMNS.length - (several() ? 1 : 2));
      flag.hidden = !paused;
      pause.hidden = paused || name === "plane"; // Ostler's own, for the connections of clients
      resume.hidden = !paused;
      const busy = workers.filter((w) => w.current_job).length;
      text(load, name === "plane" ? "Ostler's own, takes the connections of clients" : `${workers.length} ${workers.length === 1 ? "worker" : "workers"}${busy ? `, ${busy} busy` : ""}`);
      keyed(el, workers.sort((a, b) => (a.node < b.node ? -1 : a.node > b.node ? 1 : a.id - b.id)), (w) => `${w.node_id}/${w.component}`, row, head);
    },
  };
}

const NUMBERS = { pid: "number spare", age: "number spare", memory: "number", crashes: "number spare" };

function row(first) {
  const cell = Object.fromEntries(["pid", "age", "memory", "crashes", "end"].map((name) => [name, h("td", { class: NUMBERS[name] ?? "spare cut" })]));
  const status = h("span", { class: "pill" });
  const note = h("span", { class: "muted" });
  const job = h("a");
  const progress = bar(`Progress of the job of ${first.component}`);
  const work = h("td", { class: "work" }, job, progress.el);
  const name = h("a");
  const node = h("td", { class: "node" });
  const el = h("tr", { id: first.component }, node, h("th", { scope: "row" }, name), h("td", {}, status, " ", note),
    cell.pid, cell.age, cell.memory, work, cell.crashes, cell.end, h("td", { class: "act" }));
  return {
    el,
    update(w) {
      attr(name, "href", workerLink(w.name));
      text(name, w.component);
      text(node, w.node);
      node.hidden = !several();
      setPill(status, w.status);
      text(note, w.restart_at ? `again in ${span(Math.max(0, (w.restart_at - now()) / 1000))}` : "");
      text(cell.pid, w.pid ?? "");
      text(cell.age, since(w.started_at));
      text(cell.memory, megabytes(w.rss_mb));
      text(cell.crashes, w.restart_count);
      attr(cell.crashes, "class", w.restart_count ? "number spare bad" : "number spare");
      text(cell.end, w.last_exit ? `${ago(w.last_exit.at)}: ${w.last_exit.text}` : "");
      attr(cell.end, "title", w.last_exit?.text);
      const holds = w.item === "" && w.task; // a worker of sessions says how many it has
      text(job, w.current_job ? `#${w.current_job} ${w.task}` : holds || "");
      const model = state.calls.has(`${w.pool}\n${holds}`); // a worker of a model has it as its key
      attr(job, "href", w.current_job ? `#/jobs/${w.current_job}` : model ? modelLink(w.pool, holds) : "#/sessions");
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
  const none = h("p", { class: "muted" }, "It has never exited.");
  const ends = h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["When", "Generation", "Kind", "How", "Job", "Peak memory", "Last output"].map((t) => h("th", { scope: "col" }, t)))), body));
  const log = tail(`/api/v1/workers/${encodeURIComponent(name)}/logs/follow`, `Output of ${name}`);
  const el = h("section", { class: "panel", "aria-label": name, id: "detail" },
    h("div", { class: "row between wrap" }, h("h2", {}, name, " ", status), h("div", { class: "row wrap" }, Object.values(buttons), h("a", { class: "button", href: "#/workers" }, "Close"))),
    facts, errors.el,
    h("h3", {}, "Output"), log.el,
    h("h3", {}, "Earlier exits"), none, ends);
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
        if (state.epoch) fill(facts, same.length ? ["Several nodes have a worker of this name: ", same.map((other) => [h("a", { href: workerLink(other.name) }, other.name), " "])] : `There is no worker ${name}.`);
        return;
      }
      setPill(status, w.status);
      const parts = [several() && `node ${w.node}`, w.pid && `pid ${w.pid}`, `generation ${w.generation}`, w.started_at && `started ${moment(w.started_at)}`, megabytes(w.rss_mb), w.current_job && `running job ${w.current_job} (${w.task})`, w.paused && "paused"];
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
