// What a job has published: links, and previews of what a browser can show without running anything of it.
import { get } from "./api.js";
import { h, keyed, text } from "./dom.js";
import { bytes } from "./format.js";

const MOST = 60; // on the page
const SHOWN = 4000; // bytes of a text
const LARGEST = 20_000_000; // bytes of a picture that is loaded without being asked for

/** {el, load()} of a job. */
export function artifacts(id) {
  const list = h("ul", { class: "plain artifacts" });
  const total = h("span", { class: "muted" });
  const more = h("p", { class: "muted" }, "There are more: ", h("a", { href: `/api/v1/jobs/${id}/artifacts` }, "all of them as JSON"));
  const el = h("section", { class: "panel", "aria-label": "Artifacts", hidden: true }, h("h2", {}, "Artifacts ", total), list, more);
  return {
    el,
    async load() {
      const { artifacts: found, next } = await get(`/jobs/${id}/artifacts?limit=${MOST}`);
      more.hidden = !next;
      el.hidden = !found.length;
      text(total, found.length ? `${found.length}, ${bytes(found.reduce((sum, one) => sum + one.size, 0))}` : "");
      keyed(list, found, (one) => `${one.key} ${one.sha256}`, (one) => ({ el: card(one) }));
    },
  };
}

function card(one) {
  const name = one.key.split("/").at(-1);
  return h("li", {}, preview(one, name),
    h("div", { class: "row between" }, h("a", { href: one.url, target: "_blank", rel: "noopener", class: "cut", title: one.key }, name), h("a", { class: "button small", href: `${one.url}${one.url.includes("?") ? "&" : "?"}download=1`, "aria-label": `Download ${one.key}` }, "Download")),
    h("p", { class: "muted small-print cut" }, `${one.type ?? "unknown type"} · ${bytes(one.size)}`, one.replaced_by ? [" · replaced by ", h("a", { href: `#/jobs/${one.replaced_by}` }, `#${one.replaced_by}`)] : null));
}

/** As what it is. Nothing of it can run: SVG is shown as an image, which runs no scripts, and HTML as its source. */
function preview(one, name) {
  const [sort] = (one.type ?? "").split("/");
  const frame = (child) => h("div", { class: "frame" }, child);
  if (sort === "image" && one.size < LARGEST) return frame(h("img", { src: one.url, alt: name, loading: "lazy" }));
  if (sort === "video") return frame(h("video", { src: one.url, controls: true, preload: "metadata", "aria-label": name }));
  if (sort === "audio") return frame(h("audio", { src: one.url, controls: true, preload: "metadata", "aria-label": name }));
  if (sort === "text" || one.type === "application/json") return frame(words(one, name));
  return frame(h("span", { class: "muted kind" }, name.includes(".") ? name.split(".").at(-1).slice(0, 8) : "file"));
}

/** The beginning of a text, as text. */
function words(one, name) {
  const el = h("pre", { class: "start", tabindex: 0, "aria-label": `Beginning of ${name}` }, "…");
  fetch(one.url, one.size ? { headers: { Range: `bytes=0-${Math.min(one.size, SHOWN) - 1}` } } : {}).then(async (answer) => {
    text(el, answer.ok ? `${(await answer.text()).slice(0, SHOWN)}${one.size > SHOWN ? "\n…" : ""}` : `This file could not be read: ${answer.status}`);
  }, () => text(el, "This file could not be read."));
  return el;
}
