// Every node of the store: whether it lives, where it is reached, what it runs.
import { get } from "./api.js";
import { complaints } from "./actions.js";
import { attr, h, keyed, setPill, text } from "./dom.js";
import { count, moment, seconds, since, span } from "./format.js";

const AGAIN = 2000; // ms between two readings: heartbeats are told to nobody who does not ask

export function page() {
  const errors = complaints();
  const body = h("tbody");
  const el = h("div", {}, h("h1", {}, "Nodes"), errors.el,
    h("section", { class: "panel", "aria-label": "Nodes" }, h("div", { class: "scroll" }, h("table", { class: "cards" },
      h("thead", {}, h("tr", {}, ["Node", "State", "Address", "Workers", "Running", "Heartbeat", "Up", "Version"].map((t, i) => h("th", { scope: "col", class: i > 3 ? "number" : null }, t)))), body))));
  let timer = 0;
  let closed = false;

  async function load() {
    clearTimeout(timer);
    try {
      const found = await get("/nodes");
      errors.clear();
      keyed(body, found.nodes.map((node) => ({ ...node, here: node.id === found.own })), (node) => node.id, row);
    } catch (error) {
      errors.say(`The nodes could not be read: ${error.message}`);
    }
    if (!closed) timer = setTimeout(() => (document.hidden ? (timer = setTimeout(load, AGAIN)) : load()), AGAIN);
  }
  load();
  return {
    el,
    title: "Nodes",
    update: (changes) => (changes.has("nodes") || changes.has("snapshot")) && load(),
    close() {
      closed = true;
      clearTimeout(timer);
    },
  };
}

/** In words: a node that lives no more by the store's clock has not said so itself. */
const condition = (node) => (node.alive || ["stopped", "dead"].includes(node.status) ? node.status : "silent");

function row(first) {
  const status = h("span", { class: "pill" });
  const here = h("span", { class: "muted" }, "this node");
  const name = h("span");
  const id = h("span", { class: "muted cut" });
  const cell = Object.fromEntries(["url", "workers", "running", "beat", "up", "version"].map((key) => [key, h("td", { class: { running: "number spare", up: "number spare", version: "number spare", beat: "number" }[key] })]));
  const el = h("tr", { id: `node-${first.id}` }, h("th", { scope: "row" }, name, " ", here, h("div", {}, id)), h("td", {}, status), cell.url, cell.workers, cell.running, cell.beat, cell.up, cell.version);
  return {
    el,
    update(node) {
      text(name, node.label);
      text(id, node.label === node.id ? (node.host ?? "") : `${node.id}${node.host && node.host !== node.name ? ` on ${node.host}` : ""}`);
      here.hidden = !node.here;
      setPill(status, condition(node));
      text(cell.url, node.url ?? "loopback only");
      attr(cell.url, "title", node.url ? null : "The logs of its workers and jobs can only be read on its own host. Set `advertise` there to read them from other nodes.");
      const counts = Object.entries(node.workers).sort();
      text(cell.workers, counts.map(([word, n]) => `${n} ${word}`).join(", ") || "none");
      attr(cell.workers, "class", counts.some(([word]) => ["failed", "crashed"].includes(word)) ? "bad" : null);
      text(cell.running, count(node.running));
      const skew = Math.abs(node.skew_ms) > 1000 ? `, clock ${node.skew_ms > 0 ? "+" : "−"}${span(Math.abs(node.skew_ms) / 1000)}` : "";
      text(cell.beat, `${seconds(node.heartbeat_age)} ago${skew}`);
      text(cell.up, node.ended_at ? `ended ${since(node.ended_at)} ago` : since(node.started_at));
      attr(cell.up, "title", moment(node.started_at));
      text(cell.version, node.version ?? "");
    },
  };
}
