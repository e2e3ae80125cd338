// What happened to a job: a bar of its waits and runs, and its events in words.
import { attr, fill, h, keyed, s, text } from "./dom.js";
import { bytes, count, fine, moment, now, span } from "./format.js";
import { nodeLabel, several } from "./state.js";

const HEIGHT = 34;
const LEAST = 5; // px of a stretch, however short

/** {el, update(job)}. */
export function timeline() {
  const track = s("svg", { class: "timeline", role: "img", "aria-label": "Timeline" });
  const list = h("ol", { class: "plain events" });
  const more = h("p", { class: "muted small-print" });
  const el = h("div", {}, track, list, more);
  let width = 0;
  let last = null;
  new ResizeObserver(([entry]) => {
    width = Math.round(entry.contentRect.width);
    if (last) update(last);
  }).observe(el);

  function update(job) {
    last = job;
    if (!width) return;
    const end = Math.max(job.finished_at ?? now(), job.created_at + 1);
    const spans = placed(stretches(job.events, end), width);
    attr(track, "viewBox", `0 0 ${width} ${HEIGHT}`);
    attr(track, "aria-label", spans.map((one) => `${one.words} ${span((one.to - one.from) / 1000)}`).join(", then "));
    track.replaceChildren(...spans.flatMap(drawn));
    const shown = job.events.filter((e) => e.name !== "progress");
    keyed(list, shown, (e) => `${e.seq} ${several()}`, (e) => ({
      el: h("li", {}, h("time", { title: moment(e.at) }, fine(e.at)), h("span", { class: "muted after" }, `+${span((e.at - job.created_at) / 1000)}`), h("strong", {}, e.name), h("span", { class: "wraps said" }, said(e))),
    }));
    const steps = job.events.length - shown.length;
    const older = (job.events[0]?.seq ?? 1) - 1;
    fill(more, [steps && `and ${count(steps)} progress ${steps === 1 ? "update" : "updates"}`, steps && older ? "; " : "",
      older > 0 && h("a", { href: `/api/v1/jobs/${job.id}/events` }, `${count(older)} older ${older === 1 ? "event" : "events"}`)].filter(Boolean));
    more.hidden = !more.textContent;
  }
  return { el, update };
}

/** Stretches of waiting and running between the events of a job. */
function stretches(events, end) {
  const found = [];
  let open = null;
  const close = (at, outcome) => {
    if (open) found.push({ ...open, to: at, outcome });
    open = null;
  };
  for (const { name, at, data } of events) {
    if (name === "processing") {
      close(at);
      open = { kind: "run", from: at, words: began(data) };
    } else if (["done", "failed", "cancelled"].includes(name)) close(at, name);
    else if (["created", "retried", "snoozed"].includes(name) || /^(requeued|aborted|returned)/.test(name)) {
      close(at, name);
      open = { kind: "wait", from: at, words: "waiting" };
    }
  }
  if (open) close(end, "");
  return found;
}

/** The same with `x` and `wide`. Runs are to scale; a wait is drawn no longer than all runs together, so that it squeezes none of them. */
function placed(spans, width) {
  const length = (one) => Math.max(one.to - one.from, 1);
  const runs = spans.filter((one) => one.kind === "run").reduce((sum, one) => sum + length(one), 0);
  const waits = spans.length - spans.filter((one) => one.kind === "run").length;
  const longest = runs ? Math.max(1, (0.4 * runs) / Math.max(1, waits)) : Infinity;
  const weight = (one) => (one.kind === "run" ? length(one) : Math.min(length(one), longest));
  const all = spans.reduce((sum, one) => sum + weight(one), 0);
  const room = Math.max(0, width - 2 - spans.length * (LEAST + 1));
  let x = 1;
  return spans.map((one) => {
    const wide = LEAST + (weight(one) / all) * room;
    const found = { ...one, x, wide, cut: one.kind === "wait" && length(one) > longest };
    x += wide + 1;
    return found;
  });
}

function drawn(one) {
  const kind = one.kind === "wait" ? "wait" : one.outcome === "done" ? "ok" : one.outcome === "failed" ? "bad" : one.outcome ? "soft" : "now";
  const words = span((one.to - one.from) / 1000);
  const tall = one.kind === "wait" ? 8 : 22;
  const parts = [s("rect", { class: `t-${kind}${one.cut ? " t-cut" : ""}`, x: one.x, y: (HEIGHT - tall) / 2, width: one.wide, height: tall, rx: 3 }, s("title", {}, `${one.words}: ${words}`))];
  // How long it took, where there is room for it: a wait has it on its line, for which that is interrupted.
  const room = words.length * 6.4 + 10;
  if (one.wide > room) {
    const middle = one.x + one.wide / 2;
    if (one.kind === "wait") parts.push(s("rect", { class: "t-gap", x: middle - room / 2, y: HEIGHT / 2 - 5, width: room, height: 10 }));
    parts.push(s("text", { class: `t-words t-on-${kind}`, x: middle, y: HEIGHT / 2 + 4, "text-anchor": "middle" }, words));
  }
  return parts;
}

/** A run in words. */
const began = (data) => `${data?.attempt ? `attempt ${data.attempt}` : "run"} on ${several() && data?.node ? `${nodeLabel(data.node)}/` : ""}${data?.worker ?? "a worker"}`;

/** What an event says, in words; of an error the first line: all of it is beside. */
function said({ data, name }) {
  if (data === null || data === undefined) return "";
  if (name === "processing") return began(data);
  if (name === "uploaded" && data.key) return `${data.key}, ${bytes(data.size)}`;
  if (typeof data.message === "string") return `${data.code ? `${data.code}: ` : ""}${shortened(data.message.split("\n")[0], 160)}`;
  return pairs(data);
}

/** Data as `name value` pairs rather than as JSON. */
function pairs(data) {
  if (typeof data !== "object") return String(data);
  if (Array.isArray(data)) return data.map((one) => pairs(one)).join(", ");
  return Object.entries(data).filter(([, value]) => value !== null).map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : shortened(String(value), 200)}`).join(" · ");
}

const shortened = (words, most) => (words.length > most ? `${words.slice(0, most - 1)}…` : words);
