// The errors of a job, of all its runs: each with its message in full and its traceback.
import { h, keyed, text } from "./dom.js";
import { fine, moment, span } from "./format.js";
import { nodeLabel, several, workerLink } from "./state.js";

/** {el, update(job)}: the newest first, which is open where the job failed. */
export function runErrors() {
  const list = h("div");
  const total = h("span", { class: "muted" });
  const el = h("section", { class: "panel", "aria-label": "Errors", hidden: true }, h("h2", {}, "Errors ", total), list);
  return {
    el,
    update(job) {
      const found = job.errors ?? [];
      el.hidden = !found.length;
      text(total, found.length > 1 ? `${found.length} runs` : "");
      const newest = found.at(-1);
      keyed(list, found.toReversed(), (one) => `${one.at} ${one.attempt} ${one.code}`, (one) => ({ el: entry(one, one === newest && job.status === "failed", job.error?.message ?? "") }));
    },
  };
}

/** A run. Its message is not said again where it stands above, as the job's own (`known`). */
function entry(one, open, known) {
  const message = one.message ?? "";
  const code = one.code && one.code !== "ERROR" ? h("strong", { class: "bad" }, one.code) : null;
  const node = several() && one.node ? `${nodeLabel(one.node)}/` : "";
  const facts = [h("time", { title: moment(one.at) }, fine(one.at)), one.duration_ms === null || one.duration_ms === undefined ? null : `after ${span(one.duration_ms / 1000)}`, one.worker && h("a", { href: workerLink(`${node}${one.worker}`) }, `${node}${one.worker}`)];
  const stack = one.traceback && h("pre", { class: "log", tabindex: 0, "aria-label": "Traceback" }, one.traceback);
  const end = () => stack && (stack.scrollTop = stack.scrollHeight); // there it says what happened
  return h("details", { class: "run", open, ontoggle: end },
    h("summary", {}, h("span", { class: "which" }, `Attempt ${one.attempt}`), code, h("span", { class: "cut grow" }, message.split("\n")[0])),
    h("div", { class: "run-body" },
      h("p", { class: "muted small-print row wrap" }, facts.filter(Boolean).map((fact) => h("span", {}, fact))),
      !(open && known.includes(message)) && h("p", { class: "message wraps" }, message), stack));
}
