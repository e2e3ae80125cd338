// Session pools: their workers slot by slot, who waits, who is connected, who was, and a look at what a session shows.
import { get, post } from "./api.js";
import { button, complaints } from "./actions.js";
import { attr, bar, h, keyed, pill, setPill, text } from "./dom.js";
import { bytes, count, megabytes, moment, seconds, since, span } from "./format.js";
import { oneSession } from "./session.js";
import { endedSessions, liveSessions } from "./sessionlist.js";
import { several, state, workerLink } from "./state.js";

const AGAIN = 2000; // ms between two readings of what the stream does not tell: bytes, idle times, memory
const CELLS = 64; // slots of a worker that are drawn one by one
const LINE = 30; // of those who wait
const MOST = 500; // live sessions on the page

export function page(id, query) {
  const errors = complaints();
  const none = h("p", { class: "panel muted", hidden: true }, "This node has no session pools. A session is one long-lived connection to a worker, such as a browser: declare a pool with @app.sessions.");
  const pools = h("div");
  const others = farWorkers();
  const one = id ? oneSession(id) : null;
  const live = liveSessions(query);
  const ended = endedSessions(query);
  const heading = id ? h("h1", {}, h("a", { href: "#/sessions" }, "Sessions"), " / ", h("code", { class: "wraps" }, id)) : h("h1", {}, "Sessions");
  const el = h("div", {}, heading, errors.el, none, one?.el, id ? null : [pools, others.el, live.el, ended.el]);
  let timer = 0;
  let closed = false;
  let looking = false;
  let again = false;
  let own = null; // the node's id
  let capacity = [];
  let sessions = [];
  let read = Date.now();

  async function load() {
    clearTimeout(timer);
    if (!document.hidden) await look();
    if (!closed) timer = setTimeout(load, AGAIN);
  }

  async function look() {
    if (looking) return void (again = true); // what has changed meanwhile is read next
    looking = true;
    try {
      if (one) await one.load();
      else {
        const [room, found] = await Promise.all([get("/capacity"), get(`/sessions?state=live&limit=${MOST}`), ended.look()]);
        own = room.node;
        [capacity, sessions, read] = [room.pools.map((p) => ({ ...p, node: room.node })), found.sessions, Date.now()];
        none.hidden = capacity.length > 0;
        others.update(room.elsewhere);
        draw();
        live.update(sessions, own, found.next ? Math.max(0, found.live - sessions.length) || 1 : 0);
      }
      errors.clear();
    } catch (error) {
      errors.say(`The sessions could not be read: ${error.message}`);
    }
    looking = false;
    if (again && !closed) {
      again = false;
      look();
    }
  }

  function draw() {
    const held = Map.groupBy(sessions.filter((s) => s.node === own), (s) => s.worker);
    keyed(pools, capacity.map((p) => ({ ...newest(p), held, read })), (p) => p.name, pool);
  }
  load();
  return {
    el,
    title: id ? `Session ${id}` : "Sessions",
    update(changes) {
      if (!changes.has("sessions") && !changes.has("snapshot")) return;
      if (!one) draw();
      look();
    },
    tick() {
      if (one) return one.tick();
      draw();
      live.tick();
      ended.tick();
    },
    focus: () => live.focus(),
    close() {
      closed = true;
      clearTimeout(timer);
      one?.close();
    },
  };
}

/** What the stream says of a pool is newer than what was read; what it leaves out is as it was read. */
function newest(p) {
  const told = state.sessions.get(p.name);
  if (!told) return p;
  const known = new Map(p.workers.map((w) => [`${w.component} ${w.generation}`, w]));
  return { ...p, ...told, name: p.name, workers: told.workers.map((w) => ({ probe_ms: null, mb: null, versions: [], ...known.get(`${w.component} ${w.generation}`), ...w })) };
}

/** It finishes what it has and takes nothing new. */
const leaves = (w) => ["draining", "stopping"].includes(w.status);

function pool(first) {
  const name = first.name;
  const errors = complaints();
  const flag = pill("paused");
  const facts = h("span", { class: "muted" });
  const verb = (what, label, words) => {
    const el = button(label, () => Promise.all(last.pools.map((one) => post(`/pools/${encodeURIComponent(one)}/${what}`))), { errors, kind: "small", done: `sessions ${name} ${what}d`, ask: words && { title: `${label} ${name}?`, words, danger: false } });
    attr(el, "aria-label", `${label} ${name}`);
    return el;
  };
  const pause = verb("pause", "Pause", "Running sessions continue. New clients wait until it is resumed, or until they time out.");
  const resume = verb("resume", "Resume");
  const figure = Object.fromEntries([["used", "in use"], ["free", "free"], ["leaving", "leaving"], ["waiting", "waiting"]].map(([key, words]) => {
    const value = h("strong");
    return [key, { value, el: h("span", { class: `gauge g-${key}` }, value, ` ${words}`) }];
  }));
  const whole = h("div", { class: "whole", role: "img" });
  const body = h("tbody");
  const line = h("ol", { class: "plain line" });
  const more = h("p", { class: "muted small-print" });
  const inLine = h("div", { class: "in-line" }, h("h3", {}, "Waiting, next in line first"), line, more);
  const counts = h("p", { class: "muted small-print" });
  const table = h("table", { class: "cards slots-table" }, h("thead", {}, h("tr", {}, ["Worker", "State", "Slots", "Served", "Probe", "Memory", "Age", ""].map((t, i) => h("th", { scope: "col", class: i > 3 && i < 7 ? "number" : null }, t)))), body);
  const el = h("section", { class: "panel pool", "aria-label": `Pool ${name}` },
    h("div", { class: "row between wrap" }, h("h2", {}, name, " ", flag, " ", facts), h("div", { class: "row" }, pause, resume)),
    errors.el,
    h("div", { class: "gauges" }, Object.values(figure).map((f) => f.el)), whole,
    h("div", { class: "scroll" }, table), inLine, counts);
  let last = first;
  return {
    el,
    update(p) {
      last = p;
      flag.hidden = !p.paused;
      pause.hidden = p.paused;
      resume.hidden = !p.paused;
      const leaving = p.workers.filter(leaves).reduce((sum, w) => sum + w.in_use, 0);
      const used = p.in_use - leaving;
      const versions = [...new Set(p.workers.flatMap((w) => w.versions))].sort();
      text(facts, [`${p.workers.length} ${p.workers.length === 1 ? "worker" : "workers"}`, `${count(p.slots)} slots`, p.pools.join() !== name && `pools ${p.pools.join(", ")}`, versions.length && `versions ${versions.join(", ")}`].filter(Boolean).join(" · "));
      text(figure.used.value, count(used));
      text(figure.free.value, count(p.free));
      text(figure.leaving.value, count(leaving));
      figure.leaving.el.hidden = !leaving;
      text(figure.waiting.value, count(p.waiting));
      attr(figure.waiting.el, "data-some", p.waiting ? true : null);
      attr(whole, "aria-label", `${name}: ${used} of ${p.slots} slots in use, ${p.free} free${leaving ? `, ${leaving} more on draining workers` : ""}, ${p.waiting} waiting`);
      shares(whole, { used, free: p.free, held: Math.max(0, p.slots - used - p.free), leaving });
      keyed(body, p.workers.map((w) => ({ ...w, node: p.node, held: p.held.get(w.component) ?? [] })), (w) => `${w.component} ${w.generation}`, (w) => workerRow(w, errors));
      waiters(p);
      const c = p.counts;
      const said = [[c.admitted, "admitted"], [c.refused, "refused"], [c.left, "left the line"], [c.expired, "waited too long"], [c.strikes, "retried with another worker"]].filter(([n]) => n).map(([n, words]) => `${count(n)} ${words}`);
      text(counts, [said.join(", "), c.bytes_in + c.bytes_out ? `${bytes(c.bytes_in)} in, ${bytes(c.bytes_out)} out` : ""].filter(Boolean).join(" · "));
      counts.hidden = !counts.textContent;
    },
  };

  function waiters(p) {
    inLine.hidden = !p.waiting;
    const older = (Date.now() - p.read) / 1000;
    keyed(line, p.line.slice(0, Math.min(LINE, p.waiting)).map((w, i) => ({ ...w, i })), (w) => w.i, () => {
      const [owner, waited, priority] = [h("span", { class: "cut" }), h("strong"), h("span", { class: "pill" })];
      return {
        el: h("li", {}, waited, owner, priority),
        update(w) {
          text(owner, w.owner);
          attr(owner, "title", w.owner);
          text(waited, seconds(w.waited + older));
          text(priority, `priority ${w.priority}`);
          priority.hidden = !w.priority;
        },
      };
    });
    const hidden = p.waiting - Math.min(LINE, p.line.length, p.waiting);
    text(more, hidden > 0 ? `and ${count(hidden)} more` : "");
    more.hidden = hidden <= 0;
  }
}

/** The whole pool as one bar. */
function shares(el, parts) {
  const all = Object.entries(parts).filter(([, n]) => n > 0);
  keyed(el, all, ([kind]) => kind, ([kind]) => {
    const part = h("span", { class: `s-${kind}` });
    return { el: part, update: ([, n]) => (part.style.flexGrow = n) };
  });
  el.hidden = !all.length;
}

function workerRow(first, errors) {
  const [status, name] = [h("span", { class: "pill" }), h("a")];
  const cells = h("div", { class: "slots", role: "img" });
  const words = h("span", { class: "muted small-print" });
  const served = bar(`Sessions that ${first.component} has served`);
  const sofar = h("span");
  const cell = Object.fromEntries(["probe", "memory", "age"].map((key) => [key, h("td", { class: key === "age" ? "number spare" : "number", "data-unit": key === "probe" ? "probe" : null })]));
  const act = (verb, label, question) => {
    const el = button(label, async () => (await post(`/workers/${encodeURIComponent(full())}/${verb}`)).message, { errors, kind: verb === "kill" ? "small danger" : "small", ask: { title: `${label} ${first.component}?`, words: question, danger: verb === "kill" }, done: `${first.component}: ${verb}` });
    attr(el, "aria-label", `${label} ${first.component}`);
    return el;
  };
  const drain = act("drain", "Drain", "It takes no new sessions. Its open sessions may continue until the drain limit; then it exits and stays stopped until it is restarted.");
  const restart = act("restart", "Restart", "It takes no new sessions. Its open sessions may continue until the drain limit; then it is restarted.");
  restart.classList.add("spare");
  const kill = act("kill", "Kill", "It is killed with SIGKILL now. Its clients are told, and it is restarted.");
  const full = () => (several() ? `${first.node}/${first.component}` : first.component);
  return {
    el: h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, status), h("td", { class: "slot-cells" }, cells, words), h("td", { class: "served", "data-unit": first.lifetime ? null : "served" }, first.lifetime ? served.el : sofar), cell.probe, cell.memory, cell.age, h("td", { class: "act verbs" }, drain, restart, kill)),
    update(w) {
      text(name, w.component);
      attr(name, "href", workerLink(full()));
      setPill(status, w.status);
      slots(cells, words, w);
      served.update(w.lifetime ? Math.min(100, (100 * w.served) / w.lifetime) : null, `${count(w.served)} of ${count(w.lifetime)}`);
      text(sofar, count(w.served));
      text(cell.probe, w.probe_ms === null ? "" : span(w.probe_ms / 1000));
      if (w.probe_ms !== null && w.probe_ms < 10) text(cell.probe, w.probe_ms < 0.05 ? "<0.1 ms" : `${w.probe_ms.toFixed(1)} ms`);
      text(cell.memory, megabytes(w.mb));
      text(cell.age, since(w.started_at));
      attr(cell.age, "title", moment(w.started_at));
      drain.disabled = leaves(w) || w.status === "stopped";
      kill.disabled = !["starting", "healthy", "suspect", "draining", "stopping"].includes(w.status);
    },
  };
}

/** Workers of other nodes, where clients go that find no slot here. */
function farWorkers() {
  const body = h("tbody");
  const free = h("span", { class: "muted" });
  const el = h("section", { class: "panel", "aria-label": "On other nodes", hidden: true }, h("h2", {}, "On other nodes ", free),
    h("div", { class: "scroll" }, h("table", { class: "cards slots-table" }, h("thead", {}, h("tr", {}, ["Worker", "State", "Slots", "Served", "Node"].map((t) => h("th", { scope: "col" }, t)))), body)));
  return {
    el,
    update(workers) {
      el.hidden = !workers.length;
      const slotsFree = workers.reduce((sum, w) => sum + w.free, 0);
      text(free, `${count(slotsFree)} ${slotsFree === 1 ? "slot" : "slots"} free`);
      keyed(body, workers, (w) => `${w.node} ${w.component}`, (first) => {
        const [status, cells, words] = [h("span", { class: "pill" }), h("div", { class: "slots", role: "img" }), h("span", { class: "muted small-print" })];
        const served = h("td", { "data-unit": "served" });
        return {
          el: h("tr", {}, h("th", { scope: "row" }, h("a", { href: workerLink(`${first.node}/${first.component}`) }, first.component)), h("td", {}, status), h("td", { class: "slot-cells" }, cells, words), served, h("td", {}, /^https?:/.test(first.url ?? "") ? h("a", { href: `${first.url}/#/sessions` }, first.name) : first.name)),
          update(w) {
            setPill(status, w.status);
            slots(cells, words, { ...w, serves: w.status === "available", held: [] });
            text(served, w.lifetime ? `${count(w.served)} of ${count(w.lifetime)}` : count(w.served));
          },
        };
      });
    },
  };
}

/** A cell for each slot: taken, free, or no longer given out. */
function slots(el, words, w) {
  const kind = leaves(w) ? "leaving" : "used";
  const free = w.serves ? "free" : "closed";
  attr(el, "aria-label", `${w.component}: ${w.in_use} of ${w.slots} slots in use${leaves(w) ? ", it leaves" : ""}`);
  text(words, w.slots > CELLS ? `${count(w.in_use)} of ${count(w.slots)}` : "");
  words.hidden = w.slots <= CELLS;
  if (w.slots > CELLS) return shares(el, { [kind]: w.in_use, [free]: w.slots - w.in_use });
  const held = w.held.toSorted((a, b) => a.started_at - b.started_at);
  const all = Array.from({ length: Math.max(w.slots, w.in_use) }, (_, i) => ({ i, kind: i < w.in_use ? kind : free, session: i < w.in_use ? held[i] : null }));
  keyed(el, all, (one) => one.i, () => {
    const part = h("span");
    return {
      el: part,
      update(one) {
        attr(part, "class", `slot s-${one.kind}`);
        attr(part, "title", one.session ? `${one.session.owner}, ${since(one.session.started_at)}` : { free: "free", closed: "closed" }[one.kind]);
      },
    };
  });
}
