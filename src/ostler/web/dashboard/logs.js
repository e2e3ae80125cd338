// A live tail of what a worker or a job prints.
import { h } from "./dom.js";
import { whileSeen } from "./state.js";

const MOST = 2000;
const COLOURS = /\u001b\[[0-9;?]*[A-Za-z]/g; // of terminals

/** {el, close()}: follows `path` from its last lines on. Stays at the end unless somebody scrolls up. */
export function tail(path, label) {
  const list = h("pre", { class: "log", tabindex: 0, role: "log", "aria-label": label, "aria-live": "off" });
  const note = h("span", { class: "muted", role: "status" }, "connecting");
  const wrap = h("input", { type: "checkbox", checked: true });
  wrap.onchange = () => list.classList.toggle("nowrap", !wrap.checked);
  const el = h("div", { class: "tail" }, h("div", { class: "row between small" }, note, h("label", { class: "row muted" }, wrap, "wrap lines")), list);
  let lines = 0;
  let place = "";
  let timer = 0;
  let source;
  const waiting = [];
  let drawing = false;

  function draw() {
    drawing = false;
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 30;
    const fresh = waiting.splice(0).slice(-MOST);
    list.append(fresh.map((line) => `${line}\n`).join(""));
    lines += fresh.length;
    // What was added at once goes at once, when enough is left without it.
    while (list.childNodes.length > 1 && lines > MOST) {
      const oldest = list.firstChild.textContent.split("\n").length - 1;
      if (lines - oldest < MOST) break;
      lines -= oldest;
      list.firstChild.remove();
    }
    if (atEnd) list.scrollTop = list.scrollHeight;
  }

  function open() {
    source = new EventSource(place ? `${path}?last=${encodeURIComponent(place)}` : path);
    source.onopen = () => (note.textContent = "following");
    source.onmessage = (message) => {
      place = message.lastEventId;
      const said = JSON.parse(message.data);
      if (said.error) {
        note.textContent = said.error;
        return;
      }
      if (said.lost) waiting.push("… some lines are missing …");
      for (const line of said.lines.slice(-MOST)) waiting.push(line.replace(COLOURS, "")); // there may be more of them than a call can take
      const following = said.note ? `following, ${said.note}` : "following";
      note.textContent = !lines && !waiting.length ? `nothing printed yet${said.note ? `, ${said.note}` : ""}` : following;
      if (!drawing && waiting.length) {
        drawing = true;
        requestAnimationFrame(draw);
      }
    };
    source.onerror = () => {
      note.textContent = "connection lost, trying again";
      if (source?.readyState === EventSource.CLOSED) timer = setTimeout(open, 2000);
    };
  }
  open();
  const unwatch = whileSeen(() => source ?? open(), () => {
    clearTimeout(timer);
    source?.close();
    source = null;
  });
  return {
    el,
    close() {
      unwatch();
      clearTimeout(timer);
      source?.close();
    },
  };
}
