// The memory of the host and of each GPU: who uses how much of it, what is reserved, and what is left.
import { attr, h, keyed, text } from "./dom.js";
import { megabytes, span } from "./format.js";

/** {el, update(memory)}: a bar for each memory, and who waits for some. */
export function memoryBars() {
  const bars = h("div");
  const body = h("ul", { class: "plain rows" });
  const waiting = h("div", { hidden: true }, h("h3", {}, "Waiting for memory"), body);
  const wrong = h("p", { class: "error", role: "alert", hidden: true });
  const legend = h("ul", { class: "legend" }, Object.entries({ own: "workers of this node", other: "everything else", reserved: "reserved", headroom: "headroom" }).map(([kind, words]) => h("li", {}, h("i", { class: `key m-${kind}` }), words)));
  const el = h("section", { class: "panel", "aria-label": "Memory", hidden: true }, h("div", { class: "row between wrap" }, h("h2", {}, "Memory"), legend), wrong, bars, waiting);
  return {
    el,
    update(memory) {
      el.hidden = !memory?.host;
      if (el.hidden) return;
      text(wrong, memory.unreadable ? `The GPUs cannot be read: ${memory.unreadable}` : "");
      wrong.hidden = !memory.unreadable;
      keyed(bars, [memory.host, ...memory.devices], (one) => one.uuid, one);
      waiting.hidden = !memory.waiting.length;
      keyed(body, memory.waiting, (w) => w.owner, (first) => {
        const words = h("span", { class: "grow wraps" });
        return {
          el: h("li", { class: "row" }, h("strong", {}, first.owner), words),
          update: (w) => text(words, `needs ${[w.gpu_mb && `${megabytes(w.gpu_mb)} of a GPU`, w.host_mb && `${megabytes(w.host_mb)} of the host`].filter(Boolean).join(" and ") || "its turn"}, for ${span(w.seconds)} now${w.reason ? `: ${w.reason}` : ""}`),
        };
      });
    },
  };
}

function one(first) {
  const name = h("strong");
  const words = h("span", { class: "muted small-print" });
  const track = h("div", { class: "memory", role: "img" });
  const owners = h("p", { class: "muted small-print" });
  const el = h("div", { class: "device" }, h("div", { class: "row between wrap" }, name, words), track, owners);
  return {
    el,
    update(m) {
      const own = m.owners.reduce((sum, o) => sum + o.mb, 0);
      const used = m.total_mb - m.free_mb;
      text(name, m.uuid === "host" ? "Host" : `GPU ${m.index ?? ""} ${m.name}`);
      text(words, `${megabytes(used)} of ${megabytes(m.total_mb)} used · ${megabytes(m.reserved_mb)} reserved · ${megabytes(m.headroom_mb)} headroom · room for ${megabytes(m.room_mb)}`);
      attr(track, "aria-label", `${m.uuid === "host" ? "Host" : `GPU ${m.name}`}: ${words.textContent}`);
      const parts = [{ kind: "other", mb: Math.max(0, used - own), title: "everything else" }];
      for (const o of m.owners) parts.push({ kind: "own", id: o.owner, mb: o.mb, title: `${o.owner}, ${o.status}` });
      parts.push({ kind: "reserved", mb: m.reserved_mb, title: "reserved" }, { kind: "free", mb: m.room_mb, title: "free" }, { kind: "headroom", mb: m.headroom_mb, title: "headroom" });
      keyed(track, parts.filter((p) => p.mb > 0), (p) => `${p.kind} ${p.id ?? ""}`, (p) => {
        const part = h("span", { class: `m-${p.kind}` });
        return {
          el: part,
          update(now) {
            part.style.width = `${(100 * now.mb) / m.total_mb}%`;
            attr(part, "title", `${now.title}: ${megabytes(now.mb)}`);
          },
        };
      });
      text(owners, m.owners.map((o) => `${o.owner} ${megabytes(o.mb)}${o.need_mb > o.mb ? ` of ${megabytes(o.need_mb)}` : ""}${o.status === "settled" ? "" : ` (${o.status === "granted" ? "loading" : o.status})`}`).join(" · "));
      owners.hidden = !m.owners.length;
    },
  };
}
