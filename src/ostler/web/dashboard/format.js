// Times and numbers as people read them.

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 0.0005) return "0 ms";
  if (seconds < 1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  if (seconds < 10) return `${seconds.toFixed(1).replace(/\.0$/, "")} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1).replace(/\.0$/, "")} h`;
  return `${Math.round(seconds / 86400)} d`;
}

/** Whole seconds, for what is counted on the page. */
export const seconds = (n) => (n < 9.5 ? `${Math.max(1, Math.round(n))} s` : span(n));

let skew = 0;

/** What the node's clock shows now: the browser's may be set wrong. */
export const now = () => Date.now() - skew;
export const setClock = (at) => (skew = Date.now() - at);

export const since = (at) => (at ? seconds(Math.max(0, (now() - at) / 1000)) : "");
export const ago = (at) => (at ? (now() - at < 1000 ? "now" : `${since(at)} ago`) : "");
export const clock = (at) => new Date(at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
export const moment = (at) => (at ? new Date(at).toLocaleString([], { dateStyle: "medium", timeStyle: "medium", hour12: false }) : "");

/** A moment as short as it can be said: the time of day, with the date where that is not today. */
export function brief(at) {
  const date = new Date(at);
  const day = date.toDateString() === new Date(now()).toDateString() ? "" : `${date.toLocaleDateString([], { month: "short", day: "numeric" })}, `;
  return `${day}${clock(at)}`;
}

export const count = (n) => (n ?? 0).toLocaleString("en-US");
export const megabytes = (mb) => (mb === null || mb === undefined ? "" : mb >= 1000 ? `${(mb / 1000).toFixed(1)} GB` : `${Math.round(mb)} MB`);

/** Bytes as people read them. */
export function bytes(n) {
  if (n === null || n === undefined) return "";
  if (n < 1000) return `${n} B`;
  for (const unit of ["KB", "MB", "GB"]) {
    n /= 1000;
    if (n < 1000 || unit === "GB") return `${n < 10 ? n.toFixed(1) : Math.round(n)} ${unit}`;
  }
}

/** How long until it is empty, counted down from when it was said; nothing to do is "", and null is nobody knows. */
export function eta(queue, said) {
  if (!queue.pending && !queue.running) return "";
  if (queue.paused) return "paused";
  if (queue.eta === null) return "unknown";
  const left = queue.eta - (now() - said) / 1000;
  if (left < -Math.max(2, queue.avg_time ?? 0)) return "unknown"; // longer than jobs of this queue usually take
  return left <= 0.5 ? "any moment" : span(left);
}

/** Jobs done a second over the last ten seconds, from the newest bucket of counters and the one before it. */
export function rate(newest, before, at) {
  if (!newest) return 0;
  const length = newest.step * 1000;
  const share = (bucket) => Math.min(1, Math.max(0, (bucket.at + 2 * length - at) / length));
  const age = Math.max(at - newest.at, 1000);
  if (!before && age < length) return (newest.done * 1000) / age; // we have just come
  return (newest.done * share(newest) + (before ? before.done * share(before) : 0)) / newest.step;
}

/** A time of day with milliseconds, for timelines. */
export function fine(at) {
  return `${clock(at)}.${String(at % 1000).padStart(3, "0")}`;
}
