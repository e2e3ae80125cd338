// A form to call a model: JSON, text, or a file as it is; the answer is shown as what it is, as it comes.
import { complaints } from "./actions.js";
import { announce, attr, fill, h, text } from "./dom.js";
import { bytes, span } from "./format.js";

const KINDS = { json: "JSON", text: "Text", file: "Image, audio or other file" };
const LONGEST = 200_000; // characters of an answer that are shown

/** {el, update(models), close()}: `of` is the model that is meant; else it is chosen. */
export function tryIt(of) {
  const errors = complaints();
  const which = h("select", { id: "try-model" });
  const other = h("input", { id: "try-id", placeholder: "as chosen", maxlength: 200 });
  const payload = h("textarea", { id: "try-payload", rows: 5, spellcheck: "false", placeholder: '{"texts": ["hello"]}' });
  const words = h("textarea", { id: "try-text", rows: 5 });
  const file = h("input", { id: "try-file", type: "file" });
  const seen = h("div", { class: "preview" });
  const kinds = Object.entries(KINDS).map(([kind, label]) => h("label", { class: "row" }, h("input", { type: "radio", name: "try-kind", value: kind, checked: kind === "json" }), label));
  const inputs = {
    json: h("div", { class: "stack" }, h("label", { for: "try-payload" }, "Payload, as JSON"), payload),
    text: h("div", { class: "stack", hidden: true }, h("label", { for: "try-text" }, "Payload, as text"), words),
    file: h("div", { class: "stack", hidden: true }, h("label", { for: "try-file" }, "File, sent unchanged"), file, seen),
  };
  const anyModel = h("div", { class: "stack", hidden: true }, h("label", { for: "try-id" }, "Another model id"), other);
  const send = h("button", { type: "submit", class: "primary" }, "Call");
  const stop = h("button", { type: "button", hidden: true }, "Stop");
  const told = h("p", { class: "muted", role: "status" }, "No call yet.");
  const answer = h("div", { class: "answer" });
  const form = h("form", { class: "stack" },
    of ? null : [h("label", { for: "try-model" }, "Model"), which, anyModel],
    h("div", { class: "row wrap", role: "group", "aria-label": "Kind of payload" }, kinds), Object.values(inputs), h("div", { class: "row" }, send, stop));
  const el = h("section", { class: "panel", "aria-label": "Try it" }, h("h2", {}, "Try it"), h("div", { class: "two even" }, form, h("div", {}, h("h3", { class: "answer-title" }, "Answer"), errors.el, told, answer)));
  const urls = new Set(); // of files and answers that are shown
  let calling = null;

  const kind = () => form.querySelector("input[name=try-kind]:checked").value;
  form.addEventListener("change", (event) => {
    if (event.target.name === "try-kind") for (const [name, part] of Object.entries(inputs)) part.hidden = name !== kind();
  });
  file.onchange = () => fill(seen, file.files[0] ? shown(file.files[0], file.files[0].name) : null);
  stop.onclick = () => calling?.abort();

  function address(blob) {
    const url = URL.createObjectURL(blob);
    urls.add(url);
    return url;
  }

  function forget() {
    for (const url of urls) URL.revokeObjectURL(url);
    urls.clear();
  }

  /** A file or an answer as what it is. */
  function shown(blob, name) {
    const url = address(blob);
    const [sort] = blob.type.split("/");
    if (sort === "image") return h("img", { src: url, alt: name });
    if (sort === "audio") return h("audio", { src: url, controls: true, "aria-label": name });
    if (sort === "video") return h("video", { src: url, controls: true, "aria-label": name });
    return h("a", { href: url, download: name, class: "button" }, `${name}, ${bytes(blob.size)}`);
  }

  function request() {
    const chosen = of ?? { ...JSON.parse(which.value || '{"task":"","model":""}'), ...(other.value.trim() ? { model: other.value.trim() } : {}) };
    if (!chosen.task) throw new Error("there is no model to call");
    if (!chosen.model) throw new Error(`${chosen.task} takes any model: enter an id`);
    const url = `/api/v1/calls/${encodeURIComponent(chosen.task)}?model=${encodeURIComponent(chosen.model)}`;
    if (kind() === "file") {
      const [found] = file.files;
      if (!found) throw new Error("choose a file first");
      return [url, found, found.type || "application/octet-stream"];
    }
    return [url, JSON.stringify({ payload: kind() === "text" ? words.value : parse(payload.value) }), "application/json"];
  }

  form.onsubmit = async (event) => {
    event.preventDefault();
    errors.clear();
    text(told, "Waiting for the model…");
    fill(answer);
    const began = performance.now();
    try {
      const [url, body, type] = request();
      calling = new AbortController();
      send.disabled = true;
      stop.hidden = false;
      attr(answer, "aria-busy", true);
      const got = await fetch(url, { method: "POST", body, headers: { "Content-Type": type }, signal: calling.signal });
      if (got.status === 401) location.assign("/login");
      const size = await show(got);
      text(told, `${got.status}, ${bytes(size)} in ${span((performance.now() - began) / 1000)}`);
      announce("The model has answered.");
    } catch (error) {
      text(told, "");
      errors.say(error.name === "AbortError" ? "Stopped: the call was cancelled." : error.message);
    } finally {
      calling = null;
      send.disabled = false;
      stop.hidden = true;
      attr(answer, "aria-busy", null);
    }
  };

  /** Show an answer, and how many bytes it had. */
  async function show(got) {
    const type = (got.headers.get("content-type") ?? "").split(";")[0];
    if (type === "text/event-stream" || type === "application/x-ndjson") return stream(got, type);
    const blob = await got.blob();
    if (type === "application/json" || type.startsWith("text/")) {
      const said = await blob.slice(0, 4 * LONGEST).text();
      const value = type === "application/json" ? parsed(said) : said;
      if (!got.ok) errors.say(value?.error ? `${value.error.code}: ${value.error.message}` : said.slice(0, 1000));
      else fill(answer, h("pre", { class: "json", tabindex: 0, "aria-label": "Answer" }, cut(typeof value === "string" ? value : JSON.stringify("result" in (value ?? {}) ? value.result : value, null, 2))));
    } else fill(answer, shown(new Blob([blob], { type }), "answer"));
    return blob.size;
  }

  async function stream(got, type) {
    const out = h("pre", { class: "json", tabindex: 0, "aria-label": "Answer", "aria-live": "off" });
    fill(answer, out);
    const decoder = new TextDecoder();
    let rest = "";
    let size = 0;
    let length = 0;
    const events = type === "text/event-stream";
    for await (const piece of chunks(got.body, () => !errors.el.hidden)) {
      size += piece.length;
      const parts = (rest + decoder.decode(piece, { stream: true })).split(events ? "\n\n" : "\n");
      rest = parts.pop();
      for (const part of parts) {
        const said = events ? item(part) : item(`data: ${part}`);
        if (said === null) continue;
        length += said.length;
        if (length < LONGEST) out.append(said);
        else if (length - said.length < LONGEST) out.append("\n… the rest is not shown");
      }
      out.scrollTop = out.scrollHeight;
    }
    return size;
  }

  /** One item of a stream as text: words as they are, anything else as a line of JSON; an error is told beside. */
  function item(part) {
    const lines = part.split("\n");
    const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).replace(/^ /, "")).join("\n");
    if (!data || data === "[DONE]") return null;
    const value = parsed(data);
    if (lines.some((line) => line.startsWith("event: error")) || value?.error) {
      if (errors.el.hidden) errors.say(value?.error ? `${value.error.code}: ${value.error.message}` : data); // the first says why
      return null;
    }
    return typeof value === "string" ? value : `${JSON.stringify(value)}\n`;
  }

  return {
    el,
    update(models, tasks) {
      if (of) return;
      const open = tasks.filter((one) => one.any_model).map((one) => ({ task: one.task, model: "" }));
      anyModel.hidden = !open.length;
      const all = [...models, ...open];
      const wanted = all.map((m) => JSON.stringify({ task: m.task, model: m.model }));
      if (wanted.join() === [...which.options].map((o) => o.value).join()) return;
      const before = which.value;
      fill(which, all.map((m, i) => h("option", { value: wanted[i] }, m.model === m.task ? m.task : `${m.task} · ${m.model || "another id"}`)));
      if (wanted.includes(before)) which.value = before;
    },
    focus: () => payload.focus(),
    close() {
      calling?.abort();
      forget();
    },
  };
}

/** The pieces of a body as they come, in every browser. After an error that was told, the connection is closed: `expected`. */
async function* chunks(body, expected) {
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    // A browser may drop what came together with the end of a connection, and the model's own words with it.
    if (!expected()) throw new Error("the response was cut off; the output of the model's worker says why");
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(words) {
  try {
    return JSON.parse(words.trim() || "null");
  } catch (error) {
    throw new Error(`the payload is not JSON: ${error.message}`);
  }
}

function parsed(words) {
  try {
    return JSON.parse(words);
  } catch {
    return words;
  }
}

const cut = (words) => (words.length > LONGEST ? `${words.slice(0, LONGEST)}\n… ${words.length - LONGEST} more characters` : words);
