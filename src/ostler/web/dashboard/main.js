// Which page is shown, whether the node is there, and the clock that lets ages grow.
import { announce, attr, fill, h, text } from "./dom.js";
import { ago } from "./format.js";
import { page as calls } from "./calls.js";
import { page as job } from "./job.js";
import { page as jobs } from "./jobs.js";
import { page as nodes } from "./nodes.js";
import { page as overview } from "./overview.js";
import { page as schedules } from "./schedules.js";
import { get } from "./api.js";
import { page as sessions } from "./sessions.js";
import { several, start, state, subscribe } from "./state.js";
import { page as workers } from "./workers.js";

const PAGES = {
  overview,
  nodes,
  workers,
  jobs: (id, query) => (id && /^\d+$/.test(id) ? job(id) : jobs(id, query)),
  schedules,
  calls,
  sessions,
};
const main = document.getElementById("main");
let shown = null;

function route() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  const key = name || "overview";
  shown?.close?.();
  for (const open of document.querySelectorAll("dialog[open]")) open.close(); // it belongs to the page before
  const make = Object.hasOwn(PAGES, key) && PAGES[key];
  shown = make ? make(rest.length ? plain(rest.join("/")) : undefined, new URLSearchParams(search)) : { el: h("p", { class: "panel" }, "There is no such page. ", h("a", { href: "#/" }, "Overview")), title: "Not found" };
  fill(main, shown.el);
  document.title = `${shown.title} · Ostler`;
  for (const link of document.querySelectorAll("nav a")) attr(link, "aria-current", link.dataset.page === key ? "page" : null);
  tabs();
  document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  shown.update?.(new Set(["snapshot", "queues", "workers", "calls", "sessions", "jobs", "health", "incidents", "nodes"]));
}

// ---- tabs: one for each kind of thing that the app has, or the node has seen

const KEPT = "ostler-tabs"; // so that a reload shows the same tabs at once
let declared = JSON.parse(sessionStorage.getItem(KEPT) ?? "[]");

async function ask() {
  try {
    const [info, { schedules: planned }] = await Promise.all([get("/info"), get("/schedules")]);
    const kinds = new Set(info.pools.map((pool) => pool.kind));
    declared = [info.tasks.length && "jobs", planned.length && "schedules", kinds.has("calls") && "calls", kinds.has("sessions") && "sessions"].filter(Boolean);
    sessionStorage.setItem(KEPT, JSON.stringify(declared));
    const nav = document.querySelector("nav"), there = new Set([...nav.children].map((link) => link.getAttribute("href")));
    nav.append(...info.pages.filter((page) => !there.has(page.path)).map((page) => h("a", { href: page.path }, page.title)));
    tabs();
  } catch {
    // The tabs stay as they were; the page says what is wrong.
  }
}

function tabs() {
  const found = new Set([...declared, state.queues.size && "jobs", state.calls.size && "calls", state.sessions.size && "sessions", several() && "nodes", "overview", "workers"]);
  for (const link of document.querySelectorAll("nav a")) link.hidden = link.dataset.page && !found.has(link.dataset.page) && !link.hasAttribute("aria-current");
}

/** Part of an address as it was meant; as it stands where it was written by hand, with a lone %. */
function plain(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function connection() {
  const el = document.getElementById("connection");
  const lost = document.getElementById("lost");
  attr(el, "data-state", state.connection);
  text(el, { live: "live", lost: "no connection", connecting: "connecting" }[state.connection]);
  const gone = state.connection === "lost";
  if (gone && lost.hidden) announce("The connection to the node was lost.");
  if (!gone && !lost.hidden) announce("The connection is back.");
  lost.hidden = !gone;
  if (gone) text(lost, `The node is not responding. This page was last updated ${ago(state.since)}; retrying.`);
  document.body.classList.toggle("stale", gone);
}

document.getElementById("theme").onclick = () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("ostler-theme", root.dataset.theme);
};

document.querySelector(".skip").onclick = (event) => {
  event.preventDefault(); // the hash is the page
  main.focus();
};

document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target.closest("input, textarea, dialog")) return;
  if (!shown?.focus) return;
  event.preventDefault();
  shown.focus();
});

let before = location.hash;
addEventListener("hashchange", () => {
  route();
  // Another page, not only another filter: the reader's place is its beginning.
  if (before.split("?")[0] !== location.hash.split("?")[0]) {
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
  before = location.hash;
});
subscribe((changes) => {
  if (changes.has("snapshot")) ask();
  if (["nodes", "snapshot", "queues", "calls", "sessions"].some((one) => changes.has(one))) tabs();
  if (changes.has("connection")) connection();
  shown?.update?.(changes);
});
setInterval(() => {
  if (document.hidden) return;
  if (state.connection === "lost") connection();
  shown?.tick?.();
}, 1000);
route();
start();
