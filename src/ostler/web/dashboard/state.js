// The live state: one stream of events, kept as the newest state of everything. Pages subscribe and draw what they need.

import { setClock } from "./format.js";

export const state = {
  connection: "connecting", // live, lost
  since: Date.now(),
  node: null,
  started: null,
  epoch: null,
  health: null,
  total: null, // all queues in one
  before: null, // its last bucket of counters but one
  queues: new Map(),
  nodes: new Map(), // by id; none while there is only this one
  workers: new Map(), // by node and component: two nodes have workers of the same name
  calls: new Map(), // models, by task and id
  sessions: new Map(), // session pools, by the name that clients connect to
  jobs: new Map(),
  incidents: new Map(),
  said: new Map(), // topic -> when its state was told, by the node's clock
  floods: 0, // how often the jobs topic said that it could not tell all
};

const listeners = new Set();
let changed = new Set();
let drawing = false;

/** Call `fn(changes)` at most once per frame while anything changes; returns how to stop. */
export function subscribe(fn) {
  listeners.add(fn);
  return () => listeners.delete(fn);
}

function touch(what) {
  changed.add(what);
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    const now = changed;
    changed = new Set();
    for (const fn of listeners) fn(now);
  });
}

function connection(word) {
  if (state.connection === word) return;
  state.connection = word;
  state.since = Date.now();
  touch("connection");
}

function take(event) {
  const [kind, second] = event.topic.split(":");
  state.said.set(event.topic, event.timestamp);
  if (kind === "stream") return stream(event);
  if (event.type === "resync") {
    state.floods += 1;
    return touch("flood");
  }
  if (kind === "queue" && second === "jobs") state.jobs.set(event.job.id, event.job), touch("jobs");
  else if (kind === "queue" && second === "status") total(event.queue), touch("queues");
  else if (kind === "queue") state.queues.set(event.queue.queue, event.queue), touch("queues");
  else if (kind === "call") state.calls.set(`${event.call.task}\n${event.call.model}`, event.call), touch("calls");
  else if (kind === "session") state.sessions.set(event.session.pool, event.session), touch("sessions");
  else if (kind === "worker") put(state.workers, workerKey(event.worker), event.worker), touch("workers");
  else if (second === "nodes") put(state.nodes, event.node.id, event.node), touch("nodes");
  else if (second === "health") (state.health = event.health), touch("health");
  else if (second === "incidents") state.incidents.set(`${event.incident.node}-${event.incident.id}`, event.incident), touch("incidents");
  if (state.jobs.size > 2000) trim();
}

const workerKey = (worker) => `${worker.node_id}/${worker.component}`;

/** What has left for good says so in its last state. */
function put(map, key, value) {
  if (value.gone) map.delete(key);
  else map.set(key, value);
}

/** Whether more than one node is known: then it is told which one a worker or job is of. */
export const several = () => state.nodes.size > 1;

/** What a node is called: its name, or its id where two share it. */
export const nodeLabel = (id) => state.nodes.get(id)?.label ?? id?.replace(/@[^@]*$/, "") ?? "";

/** The worker of that name: its full one, or without its node where that is enough. */
export function findWorker(name) {
  const all = [...state.workers.values()];
  const found = all.filter((w) => w.name === name);
  const same = found.length ? found : all.filter((w) => w.component === name || `${w.node}/${w.component}` === name || `${w.node_id}/${w.component}` === name);
  return same.length === 1 ? same[0] : null;
}

/** Where a worker's page is: `name` as verbs take it. */
export const workerLink = (name) => `#/workers/${encodeURIComponent(name).replaceAll("%3A", ":").replaceAll("%2F", "/").replaceAll("%40", "@")}`;

/** Where a model's page is. */
export const modelLink = (task, model) => `#/calls/${encodeURIComponent(task)}/${encodeURIComponent(model)}`;

function total(queue) {
  if (state.total?.recent && state.total.recent.at !== queue.recent?.at) state.before = state.total.recent;
  state.total = queue;
}

function stream(event) {
  if (event.type === "resync") {
    for (const map of [state.queues, state.nodes, state.workers, state.calls, state.sessions, state.jobs, state.incidents]) map.clear();
    return;
  }
  setClock(event.timestamp);
  state.node = event.stream.node;
  state.started = event.stream.started_at;
  if (state.epoch && state.epoch !== event.stream.epoch) touch("restarted");
  state.epoch = event.stream.epoch;
  keepalive = event.stream.keepalive;
  touch("snapshot");
}

/** Old ended jobs are of no use to any page. */
function trim() {
  const ended = [...state.jobs.values()].filter((job) => job.finished_at).sort((a, b) => a.finished_at - b.finished_at);
  for (const job of ended.slice(0, 1000)) state.jobs.delete(job.id);
}

// ---- the connection

let source = null;
let last = "";
let retry = 500;
let timer = 0;
let heard = Date.now();
let keepalive = 15;

function open() {
  clearTimeout(timer);
  source?.close();
  heard = Date.now();
  source = new EventSource(`/api/v1/events?ping=1${last ? `&last=${encodeURIComponent(last)}` : ""}`);
  source.addEventListener("ping", () => (heard = Date.now()));
  source.onopen = () => {
    retry = 500;
    connection("live");
  };
  source.onmessage = (message) => {
    heard = Date.now();
    if (message.lastEventId) last = message.lastEventId;
    take(JSON.parse(message.data));
  };
  source.onerror = () => {
    lost();
    // An EventSource does not say why. A token that is no longer the node's must be asked for, not waited for.
    fetch("/api/v1/info").then((answer) => answer.status === 401 && location.assign("/login"), () => {});
  };
}

function lost() {
  connection("lost");
  // The browser tries again by itself, except when the answer was an error. Ours is the same for both.
  source.close();
  source = null;
  clearTimeout(timer);
  timer = setTimeout(open, retry);
  retry = Math.min(retry * 1.6, 5000);
}

/** A node or a network that hangs ends no connection; it is its silence that tells. */
function listen() {
  if (source && Date.now() - heard > 2500 * keepalive + 2000) lost();
}

export function start() {
  open();
  setInterval(listen, 1000);
  addEventListener("online", () => source ?? open());
  whileSeen(() => source ?? open(), () => {
    source?.close();
    source = null;
  });
}

/** A hidden tab gives its connections back (browsers allow six to a host), and takes up where it was when it is looked at again. */
export function whileSeen(again, leave) {
  let hidden = 0;
  const turned = () => {
    clearTimeout(hidden);
    if (document.hidden) hidden = setTimeout(leave, 20_000);
    else again();
  };
  document.addEventListener("visibilitychange", turned);
  return () => {
    clearTimeout(hidden);
    document.removeEventListener("visibilitychange", turned);
  };
}
