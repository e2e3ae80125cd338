// Store a job by hand: the task, its arguments, and when.
import { get, post } from "./api.js";
import { complaints } from "./actions.js";
import { h, text } from "./dom.js";
import { argumentsOf } from "./example.js";

/** Open the form; when the job is stored, its page opens. */
export async function newJob() {
  const errors = complaints();
  const task = h("select", { id: "new-task" });
  const takes = h("p", { class: "muted small-print", id: "new-takes" });
  const args = h("textarea", { id: "new-args", "aria-describedby": "new-takes", rows: 6, spellcheck: "false" });
  const delay = h("input", { id: "new-delay", type: "number", min: 0, step: "any", placeholder: "0" });
  const store = h("button", { type: "submit", class: "primary" }, "Enqueue");
  const form = h("form", { class: "stack" }, h("label", { for: "new-task" }, "Task"), task, h("label", { for: "new-args" }, "Arguments, as a JSON object"), takes, args, h("label", { for: "new-delay" }, "Delay in seconds"), delay, errors.el,
    h("div", { class: "row end" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), store));
  const dialog = h("dialog", { "aria-labelledby": "new-title" }, h("h2", { id: "new-title" }, "New job"), form);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  let tasks = [];
  try {
    tasks = (await get("/info")).tasks;
  } catch (error) {
    errors.say(error.message);
  }
  task.append(...tasks.map((t) => h("option", { value: t.name }, t.name)));
  const suggest = () => {
    const chosen = tasks.find((t) => t.name === task.value);
    args.value = JSON.stringify(argumentsOf(chosen), null, 2);
    text(takes, chosen ? `${chosen.name}(${chosen.signature})` : "");
  };
  task.onchange = suggest;
  suggest();
  form.onsubmit = async (event) => {
    event.preventDefault();
    errors.clear();
    store.disabled = true;
    try {
      const body = { task: task.value, args: parse(args.value) };
      if (Number(delay.value) > 0) body.delay = Number(delay.value);
      const job = await post("/jobs", body);
      dialog.close();
      location.hash = `#/jobs/${job.id}`;
    } catch (error) {
      errors.say(error.message);
    } finally {
      store.disabled = false;
    }
  };
}

function parse(words) {
  try {
    return JSON.parse(words.trim() || "{}");
  } catch (error) {
    throw new Error(`the arguments are not JSON: ${error.message}`);
  }
}
