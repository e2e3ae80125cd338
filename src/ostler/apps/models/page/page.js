// A form for each task: what is sent is what any other client sends.
import { fill, h, text } from "/ui/dom.js";

const main = document.getElementById("main");

/** What the page knows of each task: where it is, what it takes, how its reply is shown. */
const TASKS = [
  { task: "embedding", path: "/api/text-to-embedding", title: "Text to embedding", about: "One text per line; the result is how similar they are, from -1 to 1.",
    value: "The dog sleeps on the sofa.\nA puppy is lying on the couch.\nShares fell sharply on Monday.", body: (form) => ({ texts: lines(form) }), show: alike },
  { task: "ocr", path: "/api/image-ocr", title: "Text in an image", about: "A photo or a scan.", file: "image/*", show: (r) => h("pre", { class: "json" }, r.text || "no text was found") },
  { task: "speech", path: "/api/automatic-speech-recognition", title: "Speech to text", about: "A recording: WAV, FLAC, Ogg or MP3.", file: "audio/*",
    show: (r) => timed(r.segments, (s) => s.text) },
  { task: "diarization", path: "/api/speaker-diarization", title: "Who speaks when", about: "A recording with several voices.", file: "audio/*",
    show: (r) => [h("p", {}, `${r.speakers} ${r.speakers === 1 ? "speaker" : "speakers"}`), timed(r.segments, (s) => s.speaker)] },
  { task: "generation", path: "/api/text-generation", title: "Text generation", about: "A question or an instruction; the answer is streamed word by word.",
    value: "What is the capital of France?", body: (form) => ({ prompt: form.querySelector("textarea").value, stream: true }), streams: true },
  { task: "captioning", path: "/api/image-captioning", title: "Image captioning", about: "A photo to describe in one sentence.", file: "image/*",
    show: (r) => [h("p", {}, r.caption), r.method === "tags-and-text" && h("p", { class: "muted" }, `Written from tags and text by a language model that has not seen the image: ${r.tags.map((t) => `${t.label} ${(100 * t.score).toFixed(0)} %`).join(", ") || "no tags"}.`)] },
];

const lines = (form) => form.querySelector("textarea").value.split("\n").filter((line) => line.trim());

function alike(reply, form) {
  const texts = lines(form), vectors = reply.embeddings;
  const product = (a, b) => vectors[a].reduce((sum, x, i) => sum + x * vectors[b][i], 0).toFixed(2);
  return h("div", { class: "scroll" }, h("table", {}, h("tbody", {}, texts.map((one, row) =>
    h("tr", {}, h("th", { scope: "row", class: "cut" }, one), texts.map((_, column) => h("td", {}, product(row, column))))))));
}

const timed = (segments, words) => h("ol", { class: "plain events" }, segments.length ? segments.map((s) =>
  h("li", { class: "row" }, h("time", { class: "after" }, `${s.start.toFixed(1)} – ${s.end.toFixed(1)} s`), h("span", {}, words(s)))) : h("li", { class: "muted" }, "nothing was found"));

async function refusal(answer) {
  if (answer.status === 401) location.assign("/login");
  const said = await answer.json().catch(() => ({}));
  return said.error ? `${said.error.code}: ${said.error.message}` : `the node answered ${answer.status}`;
}

/** The text of a stream of events, as it grows. */
async function* pieces(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function run(one, form, models, out, state) {
  const began = performance.now();
  const file = form.querySelector("input[type=file]")?.files[0];
  const model = models.value;
  const sent = one.file
    ? { method: "POST", body: file, headers: { "Content-Type": file.type || "application/octet-stream" } }
    : { method: "POST", body: JSON.stringify({ ...one.body(form), model }), headers: { "Content-Type": "application/json" } };
  const answer = await fetch(one.file ? `${one.path}?model=${encodeURIComponent(model)}` : one.path, sent);
  if (!answer.ok) throw new Error(await refusal(answer));
  if (one.streams) {
    const words = h("p", { class: "wraps" });
    fill(out, words);
    for await (const piece of pieces(answer)) if (piece.text) words.append(piece.text);
  } else {
    fill(out, one.show(await answer.json(), form));
  }
  text(state, `answered in ${((performance.now() - began) / 1000).toFixed(2)} s`);
}

function panel(one, ids) {
  const models = h("select", { "aria-label": "Model" }, ids.map((id) => h("option", { value: id }, id)));
  const state = h("span", { class: "muted", role: "status" });
  const out = h("div", { "aria-live": "polite" });
  const seen = h("img", { alt: "", hidden: true, height: 120 });
  const button = h("button", { class: "primary", type: "submit" }, "Run");
  const input = one.file
    ? h("input", { type: "file", accept: one.file, required: true, "aria-label": one.title, onchange: (event) => preview(event.target.files[0], seen) })
    : h("textarea", { rows: 3, required: true, "aria-label": one.title }, one.value);
  const form = h("form", { class: "stack", onsubmit: async (event) => {
    event.preventDefault();
    button.disabled = true;
    text(state, "running; the first call loads the model");
    fill(out);
    try {
      await run(one, form, models, out, state);
    } catch (error) {
      text(state, "");
      fill(out, h("p", { class: "error", role: "alert" }, error.message));
    }
    button.disabled = false;
  } }, input, seen, h("div", { class: "row wrap" }, models, button, state), out);
  return h("section", { class: "panel", id: one.task }, h("h2", {}, one.title), h("p", { class: "muted" }, one.about), form);
}

function preview(file, seen) {
  seen.hidden = !file?.type.startsWith("image/");
  if (seen.hidden) return;
  const reader = new FileReader();
  reader.addEventListener("load", () => seen.setAttribute("src", reader.result));
  reader.readAsDataURL(file);
}

async function start() {
  const answer = await fetch("/api/v1/health");
  if (!answer.ok) throw new Error(await refusal(answer));
  const known = Object.keys((await answer.json()).models);
  const of = (task) => known.filter((name) => name.startsWith(`${task}:`)).map((name) => name.slice(task.length + 1));
  fill(main, h("h1", {}, "Models"), h("p", { class: "muted" }, "The first call of a task loads its model, which then stays warm for a minute."),
    h("div", { class: "two even" }, TASKS.filter((one) => of(one.task).length).map((one) => panel(one, of(one.task)))));
}

start().catch((error) => fill(main, h("p", { class: "error", role: "alert" }, error.message)));
