// Buttons that do something on the node. What goes wrong is said beside the button that was pressed.
import { announce, attr, h } from "./dom.js";

/** A question that must be answered; true when it was confirmed. The browser keeps the focus inside and Escape means no. */
export function confirm(title, words, verb, danger = true, no = verb.startsWith("Cancel") ? "Do not cancel" : "Cancel") {
  return new Promise((answer) => {
    const dialog = h("dialog", { "aria-labelledby": "dialog-title" },
      h("h2", { id: "dialog-title" }, title),
      h("p", {}, words),
      h("form", { method: "dialog", class: "row end" },
        h("button", { value: "no", autofocus: true }, no),
        h("button", { value: "yes", class: danger ? "danger" : "primary" }, verb)));
    dialog.addEventListener("close", () => {
      answer(dialog.returnValue === "yes");
      dialog.remove();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Where the errors of some buttons are shown: {el, say(words), clear()}. */
export function complaints() {
  const el = h("p", { class: "error", role: "alert", hidden: true });
  return {
    el,
    say(words) {
      el.textContent = words;
      el.hidden = false;
    },
    clear() {
      el.hidden = true;
      el.textContent = "";
    },
  };
}

/** A button: asks first where `ask` is given, is busy while `act` runs, tells the outcome (what `act` returns, if it is words). `ask` may be a function. */
export function button(label, act, { ask = null, kind = "", errors, done = null, title = null } = {}) {
  const el = h("button", { type: "button", class: kind, title });
  el.append(label);
  el.addEventListener("click", async () => {
    const question = typeof ask === "function" ? ask() : ask;
    if (question && !(await confirm(question.title, question.words, question.verb ?? label, question.danger ?? true, question.no))) return;
    errors?.clear();
    attr(el, "aria-busy", true);
    el.disabled = true;
    try {
      const said = await act();
      announce(typeof said === "string" ? said : (done ?? `${label}: done`));
      return said;
    } catch (error) {
      errors?.say(`${label}: ${error.message}`);
    } finally {
      attr(el, "aria-busy", null);
      el.disabled = false;
    }
  });
  return el;
}
