// One session: its facts, and what it shows, live.
import { get } from "./api.js";
import { complaints } from "./actions.js";
import { attr, facts, h, setPill, text } from "./dom.js";
import { bytes, moment, seconds, since, span } from "./format.js";
import { endButton, REASONS } from "./sessionlist.js";
import { several, whileSeen, workerLink } from "./state.js";

export function oneSession(id) {
  const errors = complaints();
  const status = h("span", { class: "pill" });
  const why = h("p", { class: "error soft", hidden: true });
  const known = facts();
  const verbs = h("div", { class: "row" });
  const view = liveView(id);
  const el = h("div", { class: "two watched" }, view.el,
    h("section", { class: "panel", "aria-label": "Session" }, h("div", { class: "row between wrap" }, h("p", {}, status), verbs), why, errors.el, known.el));
  let last = null;
  let read = 0;
  let end = null;

  function draw() {
    if (!last) return;
    const s = last;
    setPill(status, s.reason ?? s.state);
    text(why, s.text ?? REASONS[s.reason] ?? s.reason ?? "");
    why.hidden = s.state !== "ended" || !why.textContent;
    if (!end) verbs.append((end = endButton(s, errors, "danger")));
    end.hidden = s.state === "ended";
    const name = several() ? `${s.node}/${s.worker}` : s.worker;
    const idle = s.idle === null ? null : s.idle + (Date.now() - read) / 1000;
    known.update(Object.entries({
      Pool: s.serves === s.pool ? s.pool : `${s.serves} (${s.pool})`, Worker: { text: name, href: workerLink(name) }, Owner: s.owner, Client: s.client, Agent: s.agent, Key: s.key, "Forwarded by": s.via, Priority: s.priority || null,
      Began: moment(s.started_at), Waited: span(s.waited_ms / 1000), Lasted: s.ended_at ? span((s.ended_at - s.started_at) / 1000) : since(s.started_at),
      Idle: idle === null ? null : seconds(idle), In: bytes(s.bytes_in), Out: bytes(s.bytes_out), "Close code": s.code, Ended: s.ended_at ? moment(s.ended_at) : null,
    }));
    view.update(s);
  }
  return {
    el,
    async load() {
      try {
        [last, read] = [await get(`/sessions/${encodeURIComponent(id)}`), Date.now()];
        errors.clear();
      } catch (error) {
        if (error.status !== 404) throw error;
        errors.say(error.message);
      }
      draw();
    },
    tick: draw,
    close: () => view.close(),
  };
}

/** Pictures from its worker, as they come. A hidden tab looks at nothing. */
function liveView(id) {
  const errors = complaints();
  const picture = h("img", { alt: `Live view of session ${id}`, hidden: true });
  const words = h("p", { class: "muted stage-words" }, "Waiting for the first image…");
  const again = h("button", { type: "button", class: "small", hidden: true }, "Try again");
  const large = h("button", { type: "button", class: "small", "aria-pressed": "false" }, "Full width");
  const el = h("section", { class: "panel", "aria-label": "Live view", hidden: true }, h("div", { class: "row between" }, h("h2", {}, "Live view"), h("div", { class: "row" }, again, large)), errors.el, h("div", { class: "screen" }, words, picture));
  let looking = false;
  let ended = false;

  function look() {
    if (looking || ended) return;
    looking = true;
    again.hidden = true;
    errors.clear();
    picture.src = `/api/v1/sessions/${encodeURIComponent(id)}/view?at=${Date.now()}`;
  }
  function leave() {
    if (!looking) return;
    looking = false;
    picture.removeAttribute("src"); // this ends the request
  }
  picture.onload = () => {
    picture.hidden = false;
    words.hidden = true;
  };
  picture.onerror = async () => {
    if (!looking) return;
    looking = false;
    again.hidden = false;
    // An image does not say why there is none.
    const answer = await fetch(`/api/v1/sessions/${encodeURIComponent(id)}`).then((a) => a.json(), () => null);
    if (answer?.state !== "ended") errors.say("No images: the worker is not sending any, or too many people are watching sessions on this node.");
  };
  again.onclick = look;
  large.onclick = () => attr(large, "aria-pressed", String(el.classList.toggle("large")));
  const unsee = whileSeen(look, leave);
  return {
    el,
    update(s) {
      if (s.state === "ended" && !ended) {
        ended = true;
        leave();
        text(words, "The session has ended.");
        words.hidden = false;
        picture.hidden = true;
        [again.hidden, large.hidden] = [true, true];
      }
      if (!s.views && el.hidden) return;
      el.hidden = false;
      if (!ended && again.hidden && !document.hidden) look();
    },
    close() {
      unsee();
      leave();
      ended = true;
    },
  };
}
