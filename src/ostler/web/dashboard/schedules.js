// Jobs that are stored by the clock: when they run next, how the last one ended, and a button to run one now.
import { get, post } from "./api.js";
import { button, complaints } from "./actions.js";
import { attr, h, keyed, setPill, table, text } from "./dom.js";
import { ago, brief, moment, now, span } from "./format.js";

const AGAIN = 5000; // ms between two readings

export function page() {
  const errors = complaints();
  const none = h("p", { class: "muted", hidden: true }, "This app has no schedules. Declare one with @app.job(cron=…) or app.cron(…).");
  const list = table("cards schedules", ["Schedule", "Task", "When", { name: "Next run", class: "number" }, "Last run", ""], "Schedules");
  const el = h("div", {}, h("h1", {}, "Schedules"), errors.el, h("section", { class: "panel", "aria-label": "Schedules" }, none, list.el));
  const jobs = new Map(); // the last job of each
  let found = [];
  let timer = 0;
  let closed = false;

  async function load() {
    clearTimeout(timer);
    try {
      if (!document.hidden) found = (await get("/schedules")).schedules;
      none.hidden = found.length > 0;
      list.el.hidden = !none.hidden;
      draw();
      await Promise.all(found.filter((one) => one.last_job && !ended(jobs.get(one.last_job))).map(last));
      draw();
    } catch (error) {
      errors.say(`The schedules could not be read: ${error.message}`);
    }
    if (!closed) timer = setTimeout(load, AGAIN);
  }

  /** Its last job, which may have been deleted. */
  const last = (one) => get(`/jobs/${one.last_job}`).then((job) => jobs.set(job.id, job.status), () => jobs.set(one.last_job, null));
  const ended = (status) => status === null || ["done", "failed", "cancelled"].includes(status);
  const draw = () => keyed(list.body, found, (one) => one.name, (one) => row(one, errors, jobs));
  load();
  return {
    el,
    title: "Schedules",
    tick: draw,
    close() {
      closed = true;
      clearTimeout(timer);
    },
  };
}

function row(first, errors, jobs) {
  const [task, args, when, zone, next, since] = [h("a"), h("span", { class: "muted cut block" }), h("code"), h("span", { class: "muted" }), h("td", { class: "number" }), h("a")];
  const status = h("span", { class: "pill" });
  const never = h("span", { class: "muted" }, "not yet");
  let step = first.step;
  const run = button("Run now", () => post("/jobs", wanted(step)).then((job) => `stored job ${job.id}`), { errors, kind: "small", ask: () => ({ title: `Run ${first.name} now?`, words: `A job of ${step.task} is stored at once. The schedule stays as it is.`, verb: "Run now", danger: false }) });
  attr(run, "aria-label", `Run ${first.name} now`);
  return {
    el: h("tr", {}, h("th", { scope: "row" }, first.name), h("td", { class: "what" }, task, args), h("td", {}, when, " ", zone), next, h("td", { class: "last" }, h("span", { class: "row" }, status, since, never)), h("td", { class: "act" }, run)),
    update(one) {
      step = one.step;
      text(task, step.task);
      attr(task, "href", `#/jobs?task=${encodeURIComponent(step.task)}`);
      text(args, step.args === "{}" ? "" : step.args);
      text(when, one.spec);
      text(zone, one.zone);
      text(next, one.next_at <= now() ? "now" : `in ${span((one.next_at - now()) / 1000)}`);
      attr(next, "title", moment(one.next_at));
      const ended = jobs.get(one.last_job);
      status.hidden = !ended;
      if (ended) setPill(status, ended);
      never.hidden = Boolean(one.last_at);
      since.hidden = !one.last_at;
      text(since, one.last_at ? ago(one.last_at) : "");
      attr(since, "title", one.last_at ? brief(one.last_at) : null);
      attr(since, "href", one.last_job && ended !== null ? `#/jobs/${one.last_job}` : null);
    },
  };
}

/** The job that a schedule would store. */
function wanted(step) {
  const options = Object.fromEntries(["priority", "attempts", "timeout"].filter((name) => step[name] !== undefined).map((name) => [name, step[name]]));
  return { task: step.task, args: JSON.parse(step.args), ...options };
}
