// One job: where it is, what went wrong, what belongs to it, what it was given and gave, what happened to it, and what it printed.
import { get, post } from "./api.js";
import { button, complaints } from "./actions.js";
import { artifacts } from "./artifacts.js";
import { attr, bar, facts, h, setPill, text } from "./dom.js";
import { moment, now, brief, span } from "./format.js";
import { tail } from "./logs.js";
import { related } from "./related.js";
import { runErrors } from "./runs.js";
import { nodeLabel, several, state, workerLink } from "./state.js";
import { timeline } from "./timeline.js";

const ENDED = ["done", "failed", "cancelled"];

export function page(id) {
  const errors = complaints();
  const status = h("span", { class: "pill", id: "job-status" });
  const progress = bar(`Progress of job ${id}`);
  const stage = h("span", { class: "muted" });
  const working = h("div", { class: "row wrap working" }, progress.el, stage);
  const task = h("span");
  const known = facts();
  const why = h("p", { class: "error soft", hidden: true });
  const problem = h("p", { class: "error problem", hidden: true });
  const args = h("pre", { class: "json", tabindex: 0, "aria-label": "Arguments" });
  const result = h("pre", { class: "json", tabindex: 0, "aria-label": "Result" });
  const resultPart = h("section", { class: "panel" }, h("h2", {}, "Result"), result);
  const runs = runErrors();
  const files = artifacts(id);
  const others = related(id);
  const line = timeline();
  const log = tail(`/api/v1/jobs/${id}/logs/follow`, `Output of job ${id}`);
  const cancel = button("Cancel", () => post(`/jobs/${id}/cancel`), { errors, kind: "danger", ask: () => ({ title: `Cancel job ${id}?`, words: job?.status === "processing" ? "The job is asked to stop first. If it does not, it is killed with everything it started." : "It ends at once, without running.", verb: "Cancel job", no: job?.status === "processing" ? "Keep it running" : "Keep it" }) });
  const retry = button("Retry", () => post(`/jobs/${id}/retry`), { errors, ask: { title: `Retry job ${id}?`, words: "It goes back to its queue and its attempts start again from 1. Its history is kept.", verb: "Retry job", danger: false } });
  const content = h("div", {},
    h("section", { class: "panel", "aria-label": "Job" }, problem, why, known.el),
    others.el, runs.el, files.el,
    h("div", { class: "two even" }, h("section", { class: "panel" }, h("h2", {}, "Arguments"), args), resultPart),
    h("section", { class: "panel" }, h("h2", {}, "Timeline"), line.el),
    h("section", { class: "panel" }, h("h2", {}, "Output"), log.el));
  const el = h("div", {},
    h("p", { class: "crumb" }, h("a", { href: "#/jobs" }, "Jobs"), ` / #${id}`),
    h("div", { class: "row between wrap" }, h("h1", {}, task, " ", status), working, h("div", { class: "row" }, cancel, retry)),
    errors.el, content);
  content.hidden = cancel.hidden = retry.hidden = working.hidden = true; // until it is known
  text(task, `Job ${id}`);
  let job = null;
  let timer = 0;
  let again = 0;
  let seen = -1;
  let beside = ""; // the state of the job when what is beside it was read

  async function load() {
    timer = 0;
    try {
      job = await get(`/jobs/${id}`);
      draw();
      if (beside !== job.status) {
        beside = job.status;
        await Promise.all([others.load(), files.load()]);
      }
    } catch (refused) {
      if (refused.status === 404 && !job) {
        errors.say(`${refused.message}. Ended jobs are deleted after a while (see retention).`);
        log.close();
      } else errors.say(refused.message);
    }
  }

  /** What the stream tells of it comes in at once; its timeline is read again, but not more than five times a second. */
  function soon() {
    timer ||= setTimeout(load, 200);
  }

  function draw() {
    content.hidden = false;
    text(task, job.task);
    setPill(status, job.cancel_requested && job.status === "processing" ? "cancelling" : job.status);
    atWork();
    cancel.hidden = ENDED.includes(job.status);
    retry.hidden = !cancel.hidden;
    text(problem, job.error ? `${job.error.code}: ${job.error.message}` : "");
    attr(problem, "class", job.status === "failed" ? "error problem" : "error soft problem");
    problem.hidden = !job.error || job.status === "done";
    const later = job.run_at && job.status === "queued" && job.run_at > now();
    text(why, later ? `Waiting: it is scheduled to run in ${span((job.run_at - now()) / 1000)}` : job.waiting_for ? `${job.status === "processing" ? "Cancelling" : "Waiting"}: ${job.waiting_for.text}` : "");
    why.hidden = !why.textContent;
    known.update([
      ["Queue", { text: job.queue, href: `#/jobs?queue=${encodeURIComponent(job.queue)}` }],
      ["Attempt", job.attempt ? `${job.attempt} of ${job.attempts}` : `none yet, ${job.attempts} allowed`],
      ["Crashes", job.crashes || null],
      ["Node", several() ? nodeLabel(job.node_id) : null],
      ["Worker", job.worker && { text: job.worker, href: workerLink(several() ? `${nodeLabel(job.node_id)}/${job.worker}` : job.worker) }],
      ["Created", { text: brief(job.created_at), title: moment(job.created_at) }],
      ["Not before", later ? { text: brief(job.run_at), title: moment(job.run_at) } : null],
      ["Started", job.started_at && { text: brief(job.started_at), title: moment(job.started_at) }],
      ["Took", job.started_at && job.finished_at ? span((job.finished_at - job.started_at) / 1000) : null],
      ["Timeout", job.timeout && span(job.timeout)],
      ["Priority", job.priority || null],
      ["Unique key", job.unique_key],
    ]);
    text(args, JSON.stringify(job.args, null, 2));
    // Its place is kept while the job may still give one, so that nothing moves when it does.
    resultPart.hidden = job.result === null && ["failed", "cancelled"].includes(job.status);
    text(result, ENDED.includes(job.status) || job.result !== null ? JSON.stringify(job.result, null, 2) : "No result yet.");
    runs.update(job);
    line.update(job);
    clearTimeout(again);
    if (job.status === "queued") again = setTimeout(soon, 3000); // what it waits for changes without an event of its own
  }

  /** How far it is, while it runs; what it had reached when it failed. */
  function atWork() {
    const reached = job.progress !== null && job.status !== "done";
    working.hidden = !reached && !(job.stage && job.status === "processing");
    progress.el.hidden = !reached;
    progress.update(job.progress);
    text(stage, job.status === "done" ? "" : (job.stage ?? ""));
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
          atWork();
        }
        soon();
      }
      if (changes.has("snapshot") || changes.has("nodes")) soon();
    },
    tick() {
      if (job && !ENDED.includes(job.status)) line.update(job);
      others.tick();
    },
    close() {
      clearTimeout(timer);
      clearTimeout(again);
      log.close();
    },
  };
}
