// The node's API: the same that anybody else uses.

export class Refused extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function ask(method, path, body) {
  let answer;
  try {
    answer = await fetch(`/api/v1${path}`, {
      method,
      headers: body === undefined ? {} : { "Content-Type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new Refused("the node is not responding; nothing was done", 0, "UNREACHABLE");
  }
  if (answer.status === 401) location.assign("/login");
  const kind = answer.headers.get("content-type") ?? "";
  const said = kind.includes("json") ? await answer.json() : await answer.text();
  if (!answer.ok) throw new Refused(said.error?.message ?? `the node answered ${answer.status}`, answer.status, said.error?.code);
  return said;
}

export const get = (path) => ask("GET", path);
export const del = (path) => ask("DELETE", path);
export const post = (path, body) => ask("POST", path, body);
