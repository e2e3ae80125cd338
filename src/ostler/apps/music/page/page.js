// The music tagger: libraries, search with a player, likeness, distributions with thresholds, and what failed.
import { get, post } from "/ui/api.js";
import { announce, fill, h, keyed, s, text } from "/ui/dom.js";

const main = document.getElementById("main");
const audio = h("audio", { id: "audio", controls: true, preload: "none" });
const playing = h("span", { class: "cut grow", id: "playing" });
const player = h("footer", { class: "player", hidden: true }, playing, audio);
main.after(player);
const span = (seconds) => (seconds < 90 ? `${Math.ceil(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`);
const named = (track) => (track.title ? [track.artist, track.title].filter(Boolean).join(" – ") : track.path.split("/").pop());

async function trying(button, work) {
  button.disabled = true;
  try {
    announce(await work());
  } catch (error) {
    announce(error.message);
  }
  button.disabled = false;
}

const action = (label, work) => h("button", { onclick: (event) => trying(event.currentTarget, work) }, label);

// ---- libraries

const libraries = h("tbody");
const STATES = ["tagged", "new", "failed", "toxic", "gone"];
let chosen = null; // the library whose tags and failures are shown
let known = [];

function libraryRow(one) {
  const cells = Object.fromEntries(["name", "state", "tracks", ...STATES].map((name) => [name, h("td", { class: name === "name" || name === "state" ? null : "number" })]));
  const bar = h("progress", { max: 1, "aria-label": `Progress of ${one.name}` });
  const doing = h("span", { class: "muted" });
  const path = `/libraries/${one.id}`;
  const choice = h("button", { onclick: () => choose(one.id), title: "Show its tags and failures below" }, "Show");
  const again = action("Retry failed", async () => `${(await post(`${path}/retry`)).tracks} tracks will be tagged again`);
  const actions = h("td", { class: "row wrap" }, choice,
    action("Scan", async () => `job ${(await post(`${path}/scan`)).job} scans it`),
    action("Calibrate…", () => calibrate(path)),
    action("Undo calibration…", () => undo(path)), again);
  const el = h("tr", {}, Object.values(cells), h("td", {}, h("div", { class: "row" }, bar, doing)), actions);
  return { el, update: (now) => {
    for (const name of STATES) text(cells[name], now.counts[name]);
    text(cells.name, now.name), text(cells.state, now.state), text(cells.tracks, now.tracks);
    const { scan } = now, { left, eta_seconds: eta } = now.tagging;
    bar.hidden = !scan && !left;
    bar.value = scan ? scan.progress : 1 - left / Math.max(1, now.tracks);
    const after = (seconds) => (seconds === null ? "" : `, ${span(seconds)} left`);
    text(doing, scan ? `${scan.files} files${after(scan.eta_seconds)}` : now.reason ?? (left ? `${left} to be tagged${after(eta)}` : now.watching ?? ""));
    el.toggleAttribute("aria-current", now.id === chosen);
    choice.hidden = known.length < 2;
    again.hidden = !now.counts.failed && !now.counts.toxic;
  } };
}

async function calibrate(path) {
  const tried = await ended((await post(`${path}/calibrate?dry_run=true`)).job);
  if (!confirm(`${tried.changed} of ${tried.files} tracks would get different tags. Store these thresholds?`)) return "nothing was changed";
  const done = await ended((await post(`${path}/calibrate`)).job);
  await show();
  return `${done.changed} of ${done.files} tracks get different tags`;
}

async function undo(path) {
  if (!confirm("Undo the last calibration? The thresholds from before it apply again.")) return "nothing was changed";
  const { calibration, job } = await post(`${path}/undo`);
  await ended(job);
  await show();
  return `calibration ${calibration} is undone`;
}

async function ended(job) {
  for (;;) {
    const found = await get(`/jobs/${job}?wait=20`);
    if (found.status === "done") return found.result;
    if (found.error) throw new Error(found.error.message);
  }
}

/** Once a second while something goes on, else now and then. */
async function follow() {
  try {
    const before = known.map((one) => one.counts.tagged).join();
    known = (await get("/libraries")).libraries;
    keyed(libraries, known, (one) => one.id, libraryRow);
    none.hidden = known.length > 0;
    if (chosen === null && known.length) choose(known[0].id);
    else if (before !== known.map((one) => one.counts.tagged).join()) show();
    keyed(inLibrary, [{ id: "", name: "all libraries" }, ...known], (one) => one.id, (one) => ({ el: h("option", { value: one.id }, one.name) }));
  } catch (error) {
    announce(error.message);
  }
  setTimeout(follow, known.some((one) => one.scan || one.due || one.tagging.left) ? 1000 : 10_000);
}

// ---- the library that is chosen: distributions and failures

const plots = h("div", { class: "plots", id: "plots" });
const failures = h("tbody");
const noneFailed = h("p", { class: "muted" }, "None.");
const spread = h("p", { class: "muted" });
let all = false;

async function choose(library) {
  chosen = library;
  await show();
}

async function show() {
  const { tags, files, model } = await get(`/libraries/${chosen}/tags?bins=40`);
  const [failed, toxic] = await Promise.all(["failed", "toxic"].map((state) => get(`/tracks?state=${state}&library=${chosen}&limit=200`)));
  tags.sort((a, b) => b.tracks - a.tracks);
  text(spread, files ? `How the scores of ${files} tracks are spread, from 0 to 1 (${model}). Tracks to the right of the line, the threshold, have the tag.` : "nothing is tagged yet");
  fill(plots, (all ? tags : tags.filter((one, n) => one.tracks || n < 6).slice(0, 12)).map(plot));
  noneFailed.hidden = toxic.tracks.length + failed.tracks.length > 0;
  keyed(failures, [...toxic.tracks, ...failed.tracks], (one) => one.id, failureRow);
  fill(tagNames, tags.map((one) => h("option", { value: one.tag })));
  text(more, all ? "Show fewer" : `Show all ${tags.length}`);
}

function plot({ tag, counts, threshold, tracks }) {
  const most = Math.max(1, ...counts.map(Math.sqrt)), wide = 100 / counts.length;
  const bars = counts.map((count, n) => s("rect", { x: n * wide, width: wide * 0.9, y: 40 * (1 - Math.sqrt(count) / most), height: (40 * Math.sqrt(count)) / most, class: (n + 0.5) / counts.length >= threshold ? "over" : null }));
  const line = s("line", { x1: 100 * threshold, x2: 100 * threshold, y1: 0, y2: 40 });
  const words = `${tag}: ${tracks} tracks reach ${threshold.toFixed(2)}`;
  return h("figure", {}, s("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", height: 56, role: "img", "aria-label": words }, s("title", {}, words), bars, line),
    h("figcaption", {}, h("button", { class: "link cut", onclick: () => { tagInput.value = tag; search(); } }, tag), h("div", { class: "muted" }, `${tracks} ${tracks === 1 ? "track" : "tracks"}, from ${threshold.toFixed(2)}`)));
}

function failureRow(one) {
  const reason = h("td");
  const el = h("tr", {}, h("td", { class: "path wraps" }, one.path), h("td", {}, one.state), reason,
    h("td", {}, one.job ? h("a", { href: `/#/jobs/${one.job}` }, `job ${one.job}`) : ""), h("td", {}, action("Retry", async () => (await post(`/tracks/${one.id}/retry`), await show(), "it is tagged again"))));
  return { el, update: (now) => text(reason, now.reason) };
}

const more = h("button", { onclick: () => { all = !all; show(); } }, "Show all");

// ---- search and likeness

const tagNames = h("datalist", { id: "tags" });
const tagInput = h("input", { list: "tags", placeholder: "rock, jazz:0.4", "aria-label": "Tags, separated by commas", id: "tag" });
const words = h("input", { type: "search", placeholder: "title, artist, path", "aria-label": "Words" });
const inLibrary = h("select", { "aria-label": "Library", onchange: () => { wantedLibrary = inLibrary.value; search(); } });
let wantedLibrary = "";
const results = h("tbody", { id: "results" });
const about = h("p", { class: "muted", role: "status" });
const details = h("section", { id: "details", hidden: true, "aria-label": "Track" });

function trackRow(one) {
  const score = one.similarity?.toFixed(3) ?? Object.values(one.scores ?? {}).map((value) => value.toFixed(2)).join(", ");
  const name = named(one);
  return h("tr", {}, h("td", { class: "tight" }, h("button", { onclick: () => play(one), "aria-label": `Play ${name}` }, "▶")),
    h("td", { class: "path" }, h("button", { class: "link wraps", onclick: () => open(one.id) }, name), one.path === name ? "" : h("div", { class: "muted wraps" }, one.path)),
    h("td", { class: "album" }, one.album ?? ""), h("td", { class: "tags" }, one.state === "tagged" ? one.tags.join(", ") : h("span", { class: "muted" }, one.state)), h("td", { class: "number tight" }, score),
    h("td", { class: "tight" }, one.state === "tagged" ? h("button", { onclick: () => similar(one) }, "Similar") : ""));
}

async function search() {
  const query = new URLSearchParams({ limit: 50 });
  for (const tag of tagInput.value.split(",").map((one) => one.trim()).filter(Boolean)) query.append("tag", tag);
  if (words.value) query.set("text", words.value);
  if (wantedLibrary) query.set("library", wantedLibrary);
  await list(() => get(`/tracks?${query}`), "");
}

const similar = (one) => list(() => get(`/tracks/${one.id}/similar?limit=25${wantedLibrary && `&library=${wantedLibrary}`}`), `Tracks that sound like ${named(one)}, most similar first.`);

async function list(ask, title) {
  try {
    const { tracks } = await ask();
    fill(results, tracks.map(trackRow));
    text(about, title || (tracks.length === 50 ? "The first 50." : `${tracks.length} tracks.`));
  } catch (error) {
    fill(results);
    text(about, error.message);
  }
}

function play(one) {
  audio.src = `/api/v1/tracks/${one.id}/audio`;
  text(playing, named(one));
  player.hidden = false;
  audio.play().catch(() => {}); // a browser that wants a click first shows its own button
}

async function open(id) {
  const one = await get(`/tracks/${id}`);
  const scores = Object.entries(one.scores).sort((a, b) => b[1] - a[1]).slice(0, 15);
  const bars = scores.map(([tag, score]) => [h("span", {}, tag),
    s("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, s("rect", { width: 100 * score, height: 10, class: score >= one.thresholds[tag] ? "over" : null }), s("line", { x1: 100 * one.thresholds[tag], x2: 100 * one.thresholds[tag], y1: 0, y2: 10 })),
    h("span", { class: "muted" }, score.toFixed(2))]);
  fill(details, h("div", { class: "row between" }, h("h3", {}, named(one)), h("button", { onclick: () => { details.hidden = true; } }, "Close")), h("p", { class: "muted wraps" }, `${one.library_name} · ${one.path} · ${one.state}${one.reason ? `: ${one.reason}` : ""}`), h("p", {}, `Tags: ${one.tags.join(", ") || "none"}`), h("div", { class: "scores" }, bars));
  details.hidden = false;
  details.scrollIntoView({ block: "nearest" });
}

// ---- the page

const table = (head, body) => h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head.map(([one, kind]) => h("th", { scope: "col", class: kind }, one)))), body));
const capital = (word) => word[0].toUpperCase() + word.slice(1);
const none = h("p", {}, "No library yet. Add one: ", h("code", {}, "ostler music add DIR"));
fill(main, h("div", {}, h("h1", {}, "Music"),
  h("section", { class: "panel", id: "libraries" }, h("h2", {}, "Libraries"), none, table([["Name"], ["State"], ["Tracks", "number"], ...STATES.map((one) => [capital(one), "number"]), [""], [""]], libraries)),
  h("section", { class: "panel" }, h("h2", {}, "Search"), h("form", { class: "row wrap", onsubmit: (event) => (event.preventDefault(), search()) }, tagInput, words, inLibrary, tagNames, h("button", { class: "primary" }, "Search")),
    details, about, table([["", "tight"], ["Track"], ["Album", "album"], ["Tags"], ["Score", "number"], ["", "tight"]], results)),
  h("section", { class: "panel" }, h("div", { class: "row between" }, h("h2", {}, "Tags and thresholds"), more), spread, plots),
  h("section", { class: "panel", id: "failures" }, h("h2", {}, "Files that failed"), noneFailed, table([["File"], ["State"], ["Why"], ["Job"], [""]], failures))));
follow();
search();
