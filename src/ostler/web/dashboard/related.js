// Jobs that belong together: the steps of a chain, the jobs of a batch and what follows them.
import { get } from "./api.js";
import { append, bar, fill, h, pill } from "./dom.js";
import { count } from "./format.js";

const jobLink = (id, words) => h("a", { href: `#/jobs/${id}` }, words);

/** {el, load(), tick()} of a job. */
export function related(id) {
  const el = h("section", { class: "panel", "aria-label": "Related jobs", hidden: true });
  let seen = "";
  let ticks = 0;
  let open = false; // whether other jobs of it have not ended yet
  async function load() {
    const found = await get(`/jobs/${id}/related`);
    open = found.batch?.pending > 0 || found.chain?.steps.some((one) => ["queued", "processing"].includes(one.status));
    if (JSON.stringify(found) === seen) return;
    seen = JSON.stringify(found);
    el.hidden = !found.chain && !found.batch && !found.follows;
    fill(el, h("h2", {}, "Related jobs"));
    if (found.chain) append(el, [chain(found.chain, Number(id))]);
    if (found.batch) append(el, [batch(found.batch, "Part of")]);
    if (found.follows) append(el, [batch(found.follows, "Follows")]);
  }
  return { el, load, tick: () => open && ++ticks % 2 === 0 && load().catch(() => {}) }; // the next one looks again
}

/** Its steps in order; those that are not stored yet have no job. */
function chain(found, id) {
  const here = found.steps.find((one) => one.job === id)?.step ?? 0;
  const step = (one) => h("li", { "aria-current": one.job === id ? "step" : null, "data-status": one.status },
    h("span", { class: "muted small-print" }, `Step ${one.step + 1}`), one.job && one.job !== id ? jobLink(one.job, one.task) : h("strong", {}, one.task),
    one.job ? h("span", { class: "row" }, pill(one.status), h("span", { class: "muted small-print" }, `#${one.job}`)) : h("span", { class: "muted small-print" }, one.step < here ? "deleted" : found.broken ? "will not run" : "not yet"));
  const before = found.steps[0].step;
  const after = found.total - 1 - found.steps.at(-1).step;
  return h("div", {}, h("h3", {}, `Chain of ${count(found.total)} steps`),
    h("ol", { class: "plain steps" }, before > 0 && h("li", { class: "muted" }, jobLink(found.first, `${count(before)} before`)), found.steps.map(step), after > 0 && h("li", { class: "muted" }, `${count(after)} more`)));
}

function batch(found, how) {
  const ended = found.total - found.pending;
  const progress = bar(`Jobs of batch ${found.id} that have ended`);
  progress.update(found.total ? (100 * ended) / found.total : 100, `${count(ended)} of ${count(found.total)}`);
  const then = found.callback_job ? ["then ", jobLink(found.callback_job, `#${found.callback_job}`)] : null;
  return h("div", {}, h("h3", {}, `${how} batch ${found.id}`),
    h("div", { class: "row wrap" }, progress.el, found.failed ? h("span", { class: "bad" }, `${count(found.failed)} failed or cancelled`) : null, h("a", { href: `#/jobs?batch=${found.id}` }, `${count(found.total)} ${found.total === 1 ? "job" : "jobs"}`), how === "Part of" && then && h("span", {}, then)));
}
