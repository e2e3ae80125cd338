// Jobs that are stored by the clock: when they run next, how the last one ended, and buttons to run one now or pause it.
import { get, post } from "./api.js";
import { button, complaints } from "./actions.js";
import { attr, h, keyed, pill, setPill, table, text } from "./dom.js";
import { ago, moment, now, span } from "./format.js";

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
  const [task, args, when, zone, next, since] = [h("a", { class: "cut block" }), h("span", { class: "muted cut block" }), h("code"), h("span", { class: "muted" }), h("td", { class: "number" }), h("a")];
  const [status, flag] = [h("span", { class: "pill" }), pill("paused")];
  const never = h("span", { class: "muted" }, "not yet");
  const verb = (label, what, done, ask = null) => {
    const el = button(label, () => post(`/schedules/${encodeURIComponent(first.name)}/${what}`).then(done), { errors, kind: "small", ask });
    attr(el, "aria-label", what === "run" ? `Run ${first.name} now` : `${label} ${first.name}`);
    return el;
  };
  let last = first;
  const paused = (found) => {
    row.update({ ...last, ...found });
    return `schedule ${first.name} is ${found.paused ? "paused" : "resumed"}`;
  };
  const run = verb("Run now", "run", (job) => (job.new ? `stored job ${job.id}` : `job ${job.id} with the same unique key already exists`), { title: `Run ${first.name} now?`, words: "Its job is stored at once. The schedule stays as it is.", verb: "Run now", danger: false });
  const [pause, resume] = [verb("Pause", "pause", paused), verb("Resume", "resume", paused)];
  const row = {
    el: h("tr", {}, h("th", { scope: "row" }, first.name, " ", flag), h("td", { class: "what" }, task, args), h("td", {}, when, " ", zone), next, h("td", { class: "last" }, h("span", { class: "row" }, status, since, never)), h("td", { class: "act verbs" }, run, pause, resume)),
    update(one) {
      last = one;
      text(task, one.step.task);
      attr(task, "href", `#/jobs?task=${encodeURIComponent(one.step.task)}`);
      text(args, one.step.args === "{}" ? "" : one.step.args);
      attr(args, "title", one.step.args);
      text(when, one.spec);
      text(zone, one.zone);
      pause.hidden = one.paused;
      flag.hidden = resume.hidden = !one.paused;
      text(next, one.paused ? "–" : one.next_at <= now() ? "now" : `in ${span((one.next_at - now()) / 1000)}`);
      attr(next, "title", one.paused ? null : moment(one.next_at));
      const ended = jobs.get(one.last_job);
      status.hidden = !ended;
      if (ended) setPill(status, ended);
      never.hidden = Boolean(one.last_at);
      since.hidden = !one.last_at;
      text(since, one.last_at ? ago(one.last_at) : "");
      attr(since, "title", one.last_at ? moment(one.last_at) : null);
      attr(since, "href", one.last_job && ended !== null ? `#/jobs/${one.last_job}` : null);
    },
  };
  return row;
}
