// The API's own description, readable: every path with what it takes and gives, an example, and a form to try it.
import { append, fill, h } from "./dom.js";
import { prefer } from "./example.js";
import { tryOperation } from "./tryapi.js";

const main = document.getElementById("main");
const METHODS = ["get", "post", "put", "patch", "delete"];

function resolve(spec, schema) {
  const name = schema?.$ref?.split("/").at(-1);
  return name ? { name, ...spec.components.schemas[name] } : (schema ?? {});
}

function type(spec, schema) {
  const found = resolve(spec, schema);
  if (found.anyOf) return found.anyOf.map((one) => type(spec, one)).join(" or ");
  if (found.enum) return found.enum.map((v) => JSON.stringify(v)).join(" | ");
  if (found.type === "array") return `list of ${type(spec, found.items)}`;
  return found.name ?? found.type ?? "anything";
}

function limits(schema) {
  const parts = [];
  if (schema.minimum !== undefined) parts.push(`at least ${schema.minimum}`);
  if (schema.maximum !== undefined) parts.push(`at most ${schema.maximum}`);
  if (schema.default !== undefined && schema.default !== null) parts.push(`default ${JSON.stringify(schema.default)}`);
  return parts.join(", ");
}

function fields(spec, schema) {
  const found = resolve(spec, schema);
  const names = Object.entries(found.properties ?? {});
  if (!names.length) return h("p", { class: "muted" }, type(spec, schema));
  return h("div", { class: "scroll" }, h("table", {}, h("tbody", {}, names.map(([name, one]) =>
    h("tr", {}, h("th", { scope: "row" }, h("code", {}, name), found.required?.includes(name) ? " *" : ""), h("td", {}, type(spec, one)), h("td", { class: "muted" }, prose([one.description, limits(one)].filter(Boolean).join("; "))))))));
}

/** Text with `code` in it. */
const prose = (words) => words.split(/`([^`]*)`/).map((part, i) => (i % 2 ? h("code", {}, part) : part));

function operation(spec, path, method, op) {
  const body = op.requestBody?.content?.["application/json"]?.schema;
  const good = Object.entries(op.responses ?? {}).findLast(([status]) => status.startsWith("2"));
  const given = good?.[1].content?.["application/json"]?.schema;
  const el = h("details", { class: "panel op" },
    h("summary", {}, h("strong", { class: `method ${method}` }, method.toUpperCase()), h("code", {}, path), h("span", { class: "muted" }, op.summary ?? "")));
  // Made when it is looked at: there are many.
  el.addEventListener("toggle", () => {
    if (!el.open || el.children.length > 1) return;
    append(el, [
      op.description && h("p", {}, prose(op.description)),
      tryOperation(spec, path, method, op),
      body && [h("h3", {}, "Body"), fields(spec, body)],
      given && Object.keys(given).length > 0 && [h("h3", {}, `Answer ${good[0]}`), fields(spec, given)],
    ]);
  });
  return el;
}

try {
  const [spec, info] = await Promise.all(["/openapi.json", "/api/v1/info"].map(async (path) => (await fetch(path)).json()));
  prefer(info);
  const groups = new Map();
  for (const [path, methods] of Object.entries(spec.paths).sort(([a], [b]) => (a < b ? -1 : 1))) {
    for (const method of METHODS) if (methods[method]) {
      const tag = methods[method].tags?.[0] ?? "app";
      groups.set(tag, [...(groups.get(tag) ?? []), operation(spec, path, method, methods[method])]);
    }
  }
  const ordered = [...groups].sort(([a], [b]) => (b === "jobs") - (a === "jobs"));
  fill(main, h("h1", {}, `${spec.info.title} ${spec.info.version}: API`), h("p", {}, prose(spec.info.description)),
    h("p", { class: "row chips" }, ordered.map(([tag]) => h("a", { class: "button chip", href: `#tag-${tag}` }, tag))));
  for (const [tag, list] of ordered) append(main, [h("h2", { id: `tag-${tag}`, class: "tag" }, tag), list]);
} catch (error) {
  fill(main, h("p", { class: "error", role: "alert" }, `The description could not be read: ${error.message}`));
}
