// One job: where it is, what it was given and gave, what happened to it, and what it printed.
import { get, post } from "./api.js";
import { button, complaints } from "./actions.js";
import { attr, bar, fill, h, keyed, s, setPill, text } from "./dom.js";
import { count, fine, moment, now, span } from "./format.js";
import { tail } from "./logs.js";
import { nodeLabel, several, state, workerLink } from "./state.js";

const ENDED = ["done", "failed", "cancelled"];

export function page(id) {
  const errors = complaints();
  const status = h("span", { class: "pill" });
  const progress = bar(`Progress of job ${id}`);
  const stage = h("span", { class: "muted" });
  const task = h("span");
  const facts = h("dl", { class: "facts" });
  const error = h("div");
  const args = h("pre", { class: "json", tabindex: 0 });
  const result = h("pre", { class: "json", tabindex: 0 });
  const resultPart = h("section", { class: "panel" }, h("h2", {}, "Result"), result);
  const line = timeline();
  const log = tail(`/api/v1/jobs/${id}/logs/follow`, `Output of job ${id}`);
  const cancel = button("Cancel", () => post(`/jobs/${id}/cancel`), { errors, kind: "danger", ask: () => ({ title: `Cancel job ${id}?`, words: job?.status === "processing" ? "It is asked first; if it does not heed that, it and everything it started is killed." : "It ends at once, without a run.", verb: "Cancel job" }) });
  const retry = button("Retry", () => post(`/jobs/${id}/retry`), { errors, ask: { title: `Retry job ${id}?`, words: "It goes back into its queue with a fresh budget. Its timeline goes on.", verb: "Retry job", danger: false } });
  const content = h("div", {},
    h("section", { class: "panel" }, h("div", { class: "row wrap" }, progress.el, stage), facts, error),
    h("section", { class: "panel" }, h("h2", {}, "Timeline"), line.el),
    h("div", { class: "two even" }, h("section", { class: "panel" }, h("h2", {}, "Arguments"), args), resultPart),
    h("section", { class: "panel" }, h("h2", {}, "Output"), log.el));
  const el = h("div", {},
    h("p", {}, h("a", { href: "#/jobs" }, "← Jobs")),
    h("div", { class: "row between wrap" }, h("h1", {}, `Job ${id} `, task, " ", status), h("div", { class: "row" }, cancel, retry)),
    errors.el, content);
  let job = null;
  let timer = 0;
  let again = 0;
  let seen = -1;

  async function load() {
    timer = 0;
    try {
      job = await get(`/jobs/${id}`);
      draw();
    } catch (problem) {
      if (problem.status === 404) {
        content.hidden = cancel.hidden = retry.hidden = true;
        errors.say(`${problem.message}. It may have been deleted by its age (see retention).`);
        log.close();
      } else errors.say(problem.message);
    }
  }

  /** What the stream tells of it comes in at once; its timeline is read again, but not more than five times a second. */
  function soon() {
    timer ||= setTimeout(load, 200);
  }

  function draw() {
    text(task, job.task);
    setPill(status, job.cancel_requested && job.status === "processing" ? "cancelling" : job.status);
    attr(status, "id", "job-status");
    progress.el.hidden = job.progress === null;
    progress.update(job.status === "done" ? 100 : job.progress);
    text(stage, job.status === "done" ? "" : (job.stage ?? ""));
    cancel.hidden = ENDED.includes(job.status);
    retry.hidden = !ENDED.includes(job.status);
    const runs = `${job.attempt} of ${job.attempts}${job.crashes ? `, ${job.crashes} crashed` : ""}`;
    const list = [
      ["Queue", h("a", { href: `#/jobs?queue=${encodeURIComponent(job.queue)}` }, job.queue)],
      ["Attempt", runs],
      ["Node", several() ? nodeLabel(job.node_id) : null],
      ["Worker", job.worker && h("a", { href: workerLink(several() ? `${nodeLabel(job.node_id)}/${job.worker}` : job.worker) }, job.worker)],
      ["Created", moment(job.created_at)],
      ["Not before", job.run_at && job.status === "queued" ? moment(job.run_at) : null],
      ["Waits", job.waiting_for?.text],
      ["Started", moment(job.started_at)],
      ["Took", job.started_at && job.finished_at ? span((job.finished_at - job.started_at) / 1000) : null],
      ["Timeout", job.timeout && span(job.timeout)],
      ["Priority", job.priority || null],
      ["Batch", job.batch],
      ["Unique key", job.unique_key],
    ];
    fill(facts, list.filter(([, v]) => v !== null && v !== undefined && v !== "").map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, v))));
    text(args, JSON.stringify(job.args, null, 2));
    resultPart.hidden = job.result === null && job.status !== "done";
    text(result, JSON.stringify(job.result, null, 2));
    fill(error, job.error && [h("p", { class: job.status === "failed" ? "error" : "error soft" }, h("strong", {}, job.error.code), ` ${job.error.message}`),
      job.error.traceback && h("details", { open: job.status === "failed" }, h("summary", {}, "Traceback"), h("pre", { class: "log", tabindex: 0 }, job.error.traceback))]);
    line.update(job);
    clearTimeout(again);
    if (job.status === "queued") again = setTimeout(soon, 3000); // what it waits for changes without an event of its own
  }
  load();
  return {
    el,
    title: `Job ${id}`,
    update(changes) {
      const told = state.jobs.get(Number(id));
      if (told && told.seq !== seen) {
        seen = told.seq;
        if (job && told.status === job.status) {
          job.progress = told.progress;
          job.stage = told.stage;
          progress.el.hidden = job.progress === null;
          progress.update(job.progress);
          text(stage, job.stage ?? "");
        }
        soon();
      }
      if (changes.has("snapshot") || changes.has("nodes")) soon();
    },
    tick: () => job && !ENDED.includes(job.status) && line.update(job),
    close() {
      clearTimeout(timer);
      clearTimeout(again);
      log.close();
    },
  };
}

/** Stretches of waiting and running between the events of a job. */
function stretches(events, end) {
  const found = [];
  let open = null;
  const close = (at, outcome) => {
    if (open) found.push({ ...open, to: at, outcome });
    open = null;
  };
  for (const event of events) {
    const { name, at } = event;
    if (name === "processing") {
      close(at);
      open = { kind: "run", from: at, words: `run ${event.data?.attempt ?? ""} on ${placed(event.data)}` };
    } else if (["done", "failed", "cancelled"].includes(name)) close(at, name);
    else if (name === "created" || name === "retried" || name === "snoozed" || name.startsWith("requeued") || name.startsWith("aborted") || name.startsWith("returned")) {
      close(at, name);
      open = { kind: "wait", from: at, words: "waiting" };
    }
  }
  if (open) close(end, "");
  return found;
}

/** The worker of a run, with its node where there are several. */
const placed = (data) => `${several() && data?.node ? `${nodeLabel(data.node)}/` : ""}${data?.worker ?? "a worker"}`;

/** What an event says: the error's message where it has one, else its data. */
function said({ data, name }) {
  if (data === null || data === undefined) return "";
  if (name === "processing") return `run ${data.attempt} on ${placed(data)}`;
  if (typeof data.message !== "string") return JSON.stringify(data);
  return `${data.code ? `${data.code}: ` : ""}${data.message}${data.worker ? ` (run ${data.attempt ?? ""} on ${data.worker})` : ""}`;
}

function timeline() {
  const track = s("svg", { class: "timeline", role: "img", "aria-label": "Timeline", preserveAspectRatio: "none" });
  const list = h("ol", { class: "plain events" });
  const more = h("p", { class: "muted" });
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
    const events = job.events;
    const start = job.created_at;
    const older = (events[0]?.seq ?? 1) - 1;
    const end = Math.max(job.finished_at ?? now(), start + 1);
    const x = (at) => ((at - start) / (end - start)) * (width - 2) + 1;
    const parts = [];
    const spans = stretches(events, end);
    for (const one of spans) {
      const kind = one.kind === "run" ? (one.outcome === "done" ? "ok" : one.outcome === "failed" ? "bad" : one.outcome ? "soft" : "now") : "wait";
      const el_ = s("rect", { class: `t-${kind}`, x: x(one.from), y: kind === "wait" ? 13 : 6, width: Math.max(1.5, x(one.to) - x(one.from)), height: kind === "wait" ? 6 : 20, rx: 2 });
      el_.append(s("title", {}, `${one.words}: ${span((one.to - one.from) / 1000)}`));
      parts.push(el_);
    }
    const named = events.filter((e) => e.name !== "progress");
    const shown = named;
    for (const event of shown) parts.push(s("line", { class: "t-mark", x1: x(event.at), x2: x(event.at), y1: 2, y2: 30 }, s("title", {}, `${event.name}, ${fine(event.at)}`)));
    attr(track, "viewBox", `0 0 ${width} 32`);
    attr(track, "aria-label", spans.map((one) => `${one.words} ${span((one.to - one.from) / 1000)}`).join(", then "));
    track.replaceChildren(...parts);
    keyed(list, shown, (e) => `${e.seq} ${several()}`, (e) => ({
      el: h("li", { class: "row" }, h("time", { title: moment(e.at) }, fine(e.at)), h("span", { class: "muted after" }, `+${span((e.at - start) / 1000)}`), h("strong", {}, e.name),
        h("code", { class: e.data?.message ? "grow wraps" : "grow cut" }, said(e))),
    }));
    const steps = events.length - named.length;
    fill(more, [steps ? `and ${steps} ${steps === 1 ? "step" : "steps"} of progress` : "", steps && older ? "; " : "",
      older > 0 && h("a", { href: `/api/v1/jobs/${job.id}/events` }, `${count(older)} older ${older === 1 ? "event" : "events"}`)]);
  }
  return { el, update };
}
