// Examples of what the API takes: arguments of a task, and bodies made of their schema.

const SAMPLES = {
  int: 0, float: 0, bool: false, null: null, list: [], dict: {},
  datetime: "2026-01-31T12:00:00+00:00", date: "2026-01-31", time: "12:30:00", timedelta: 60,
  uuid: "6f1c2d1e-0a55-4f4e-8a5b-3f1f0d9a7c11", decimal: "12.50",
};
let known = { tasks: [] };

/** Use the names of what this node has. */
export const prefer = (info) => (known = info);

/** The parameters of a task that must be given, with something of their kind. */
export function argumentsOf(task) {
  return Object.fromEntries((task?.parameters ?? []).filter((p) => p.required).map((p) => [p.name, sampleOf(p.type)]));
}

/** A value of a parameter's type, as `jobs/kinds.py` describes types. */
function sampleOf(type) {
  if (!Array.isArray(type)) return type in SAMPLES ? SAMPLES[type] : "";
  const [what, ...parts] = type;
  if (what === "literal") return parts[0];
  if (what === "any of") return sampleOf(parts.find((one) => one !== "null") ?? "null");
  if (what === "tuple") return parts.map(sampleOf);
  if (what === "object" || what === "model") {
    const given = Object.entries(parts[1]).filter(([, field]) => field.required);
    return Object.fromEntries(given.map(([name, field]) => [name, sampleOf(field.type)]));
  }
  return what === "dict" ? {} : [];
}

/** A value that fits a schema: what must be given, and as many optional fields as it takes to say something. */
export function bodyOf(spec, schema, depth = 0) {
  const found = schema?.$ref ? at(spec, schema.$ref) : (schema ?? {});
  if (found.example !== undefined) return found.example;
  if (found.default !== undefined && found.default !== null) return found.default;
  if (found.enum) return found.enum[0];
  const some = found.anyOf?.find((one) => one.type !== "null") ?? found.allOf?.[0];
  if (some) return bodyOf(spec, some, depth);
  if (found.type === "array") return depth < 4 ? [bodyOf(spec, found.items, depth + 1)] : [];
  if (found.properties) return objectOf(spec, found, depth);
  return { string: "", integer: found.minimum ?? 1, number: 1, boolean: false, object: {} }[found.type] ?? {};
}

function objectOf(spec, schema, depth) {
  const names = Object.keys(schema.properties);
  if (names.includes("task") && names.includes("args")) {
    const task = known.tasks.find((one) => one.parameters.length) ?? known.tasks[0];
    return { task: task?.name ?? "", args: argumentsOf(task) };
  }
  const wanted = schema.required?.length ? schema.required : names.slice(0, 1);
  return Object.fromEntries(wanted.map((name) => [name, bodyOf(spec, schema.properties[name], depth + 1)]));
}

/** What a reference such as #/components/schemas/Job means. */
const at = (spec, ref) => ref.replace(/^#\//, "").split("/").reduce((found, name) => found?.[name], spec) ?? {};
