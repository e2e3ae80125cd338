// A form for one operation of the API: its parameters and body, the same as a curl command, and the answer.
import { attr, h, text } from "./dom.js";
import { bytes, span } from "./format.js";
import { bodyOf } from "./example.js";

const LONGEST = 20_000; // characters of an answer that are shown
const PATIENCE = 3000; // ms for an answer that never ends, such as a stream of events

let forms = 0;

export function tryOperation(spec, path, method, op) {
  const id = `op${(forms += 1)}`;
  const schema = op.requestBody?.content?.["application/json"]?.schema;
  const other = op.requestBody && !schema ? Object.keys(op.requestBody.content)[0] : null;
  const parameters = (op.parameters ?? []).filter((p) => p.in !== "header");
  const inputs = parameters.map((p) => [p, h("input", { id: `${id}-${p.name}`, placeholder: placeholder(p), required: p.in === "path" })]);
  const body = schema && h("textarea", { id: `${id}-body`, rows: 6, spellcheck: "false" });
  if (body) body.value = JSON.stringify(bodyOf(spec, schema), null, 2);
  const command = h("pre", { class: "json", tabindex: 0, "aria-label": "As a command" });
  const send = h("button", { type: "submit", class: method === "delete" ? "danger" : "primary" }, `Send ${method.toUpperCase()}`);
  const told = h("span", { class: "muted", role: "status" });
  const answer = h("pre", { class: "json", tabindex: 0, "aria-label": "Answer", hidden: true });
  const form = h("form", { class: "try", "aria-label": `Try ${method.toUpperCase()} ${path}` },
    inputs.length > 0 && h("div", { class: "parameters" }, inputs.map(([p, input]) => h("div", { class: "stack" }, h("label", { for: input.id }, h("code", {}, p.name), p.required ? " *" : "", h("span", { class: "muted small-print" }, ` ${p.in}`)), input, described(p)))),
    body && h("div", { class: "stack" }, h("label", { for: body.id }, "Body, as JSON"), body),
    other && h("p", { class: "muted" }, `Takes a body of type ${other}: use the command.`),
    command, h("div", { class: "row wrap" }, send, told), answer);

  function address() {
    const filled = path.replace(/\{(\w+)(:path)?\}/g, (all, name) => {
      const value = inputs.find(([p]) => p.in === "path" && p.name === name)?.[1].value;
      return value ? encodeURIComponent(value).replaceAll("%2F", "/").replaceAll("%3A", ":") : all;
    });
    const query = new URLSearchParams(inputs.filter(([p, input]) => p.in === "query" && input.value).map(([p, input]) => [p.name, input.value]));
    return `${filled}${query.size ? `?${query}` : ""}`;
  }

  function draw() {
    const quoted = (words) => `'${words.replaceAll("'", "'\\''")}'`;
    const parts = ["curl -s", method === "get" ? "" : `-X ${method.toUpperCase()}`, quoted(`${location.origin}${address()}`), body ? `-H 'Content-Type: application/json' -d ${quoted(body.value.replace(/\s*\n\s*/g, " ").trim())}` : ""];
    text(command, parts.filter(Boolean).join(" "));
  }

  form.oninput = draw;
  form.onsubmit = async (event) => {
    event.preventDefault();
    send.disabled = true;
    text(told, "…");
    const began = performance.now();
    try {
      const [got, words] = await ask(address(), { method: method.toUpperCase(), ...(body ? { body: body.value, headers: { "Content-Type": "application/json" } } : {}) });
      text(told, `${got.status} ${got.statusText} · ${got.headers.get("content-type") ?? "no content"} · ${bytes(words.length)} in ${span((performance.now() - began) / 1000)}`);
      attr(told, "class", got.ok ? "muted" : "bad");
      answer.hidden = !words;
      text(answer, shown(words));
    } catch (error) {
      attr(told, "class", "bad");
      text(told, `no answer: ${error.message}`);
      answer.hidden = true;
    } finally {
      send.disabled = false;
    }
  };
  draw();
  return form;
}

/** The answer and its text; of a stream what came within a few seconds. */
async function ask(url, how) {
  const got = await fetch(url, how);
  if (!/event-stream|multipart/.test(got.headers.get("content-type") ?? "")) return [got, await got.text()];
  const reader = got.body.getReader();
  const decoder = new TextDecoder();
  const end = setTimeout(() => reader.cancel(), PATIENCE);
  let words = "";
  for (let piece = await reader.read(); !piece.done && words.length < LONGEST; piece = await reader.read()) words += decoder.decode(piece.value, { stream: true });
  clearTimeout(end);
  reader.cancel().catch(() => {});
  return [got, `${words}\n… this is a stream; the rest is not shown`];
}

function shown(words) {
  let found = words;
  try {
    found = JSON.stringify(JSON.parse(words), null, 2);
  } catch {
    // Not JSON: as it is.
  }
  return found.length > LONGEST ? `${found.slice(0, LONGEST)}\n… ${found.length - LONGEST} more characters` : found;
}

function placeholder(p) {
  const { schema } = p;
  const kind = schema?.anyOf?.find((one) => one.type !== "null") ?? schema ?? {};
  return kind.default !== undefined ? String(kind.default) : (kind.enum?.join(" | ") ?? kind.type ?? "");
}

function described(p) {
  const words = p.description ?? p.schema?.description;
  return words ? h("span", { class: "muted small-print" }, words) : null;
}
