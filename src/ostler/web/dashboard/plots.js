// Plots over time, drawn as SVG: bars that are stacked, or lines. They scale with the page and can be read with the keyboard.
import { clock, count, moment, now, span } from "./format.js";
import { h, s, text } from "./dom.js";

const HEIGHT = 180;
const PAD = { left: 46, right: 8, top: 10, bottom: 22 };

/** A round number at or above a count, and how many steps the axis has up to it: whole ones. */
function nice(value) {
  if (value <= 1) return [1, 1];
  const power = 10 ** Math.floor(Math.log10(value));
  const factors = power === 1 ? [[2, 2], [4, 4], [5, 5]] : [[1, 2], [2, 2], [2.5, 5], [4, 4], [5, 5]];
  for (const [factor, steps] of factors) if (factor * power >= value * 0.999) return [factor * power, steps];
  return [10 * power, 5];
}

// Durations span decades: round ones, about ten times longer each.
const DURATIONS = [[0.001, "1 ms"], [0.01, "10 ms"], [0.1, "100 ms"], [1, "1 s"], [10, "10 s"], [60, "1 min"], [600, "10 min"], [3600, "1 h"], [36_000, "10 h"], [86_400, "1 d"], [864_000, "10 d"]];

/** The axis up to `high`: {ticks: [[value, label], …], place(value) from 0 to 1}. */
function axis(low, high, durations, show) {
  if (!durations || high <= 0) {
    const [top, steps] = nice(high);
    return { ticks: Array.from({ length: steps + 1 }, (_, i) => [(top * i) / steps, high > 0 ? show((top * i) / steps) : ""]), place: (value) => value / top };
  }
  const last = Math.max(1, DURATIONS.findIndex(([one]) => one >= high * 0.999));
  const first = Math.min(last - 1, Math.max(0, DURATIONS.findLastIndex(([one]) => one <= low * 1.001)));
  const ticks = DURATIONS.slice(first, last + 1);
  const [bottom, top] = [ticks[0][0], ticks.at(-1)[0]];
  return { ticks, place: (value) => Math.min(1, Math.max(0, Math.log(Math.max(value, 1e-9) / bottom) / Math.log(top / bottom))) };
}

const MINUTES = [1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440];

/** Round times of day between two moments, at most `most`. */
function moments(start, end, most) {
  const minutes = MINUTES.find((one) => (end - start) / 60_000 / one <= most) ?? 2880;
  const zone = new Date(start).getTimezoneOffset() * 60_000;
  const step = minutes * 60_000;
  const first = Math.ceil((start - zone) / step) * step + zone;
  return Array.from({ length: Math.max(0, Math.floor((end - first) / step) + 1) }, (_, i) => first + i * step);
}

/**
 * {el, update(points, back, step)}: `series` is [{name, key, kind: "bar" | "line", class}], points have `at` (ms) and the keys.
 * `show(value)` gives a value in words; `counted` is what bars count.
 */
export function plot(title, series, show, empty, counted = "jobs") {
  const svg = s("svg", { class: "plot", tabindex: 0, role: "img", "aria-label": title });
  const tip = h("div", { class: "tip", hidden: true, role: "status" });
  const legend = h("ul", { class: "legend" }, series.map((one) => h("li", {}, h("i", { class: `key ${one.class}` }), one.name)));
  const unit = h("span", { class: "muted" });
  const el = h("figure", { class: "panel" }, h("figcaption", { class: "row between" }, h("h3", {}, title, " ", unit), legend), h("div", { class: "stage" }, svg, tip));
  let data = { points: [], back: 3600, step: 10 };
  let width = 0;
  let cursor = null;
  let slots = [];

  new ResizeObserver(([entry]) => {
    const seen = Math.round(entry.contentRect.width);
    if (seen && seen !== width) {
      width = seen;
      draw();
    }
  }).observe(svg.parentElement);

  function draw() {
    if (!width) return;
    const { points, back, step } = data;
    const end = Math.ceil(now() / 1000 / step) * step * 1000;
    const start = end - back * 1000;
    const inside = points.filter((p) => p.at >= start);
    const w = width - PAD.left - PAD.right;
    const tall = HEIGHT - PAD.top - PAD.bottom;
    const bars = series.filter((one) => one.kind === "bar");
    const lines = series.filter((one) => one.kind === "line");
    // Never more bars than there is room for: neighbours are put together.
    const slotWidth = Math.max(1, Math.ceil((back / step) / (w / 4)));
    const wide = slotWidth * step * 1000;
    slots = gather(inside, wide, slotWidth);
    text(unit, bars.length ? `${counted} per ${span(wide / 1000)}` : "");
    const highest = Math.max(0, ...slots.map((p) => Math.max(bars.reduce((sum, one) => sum + (p[one.key] ?? 0), 0), ...lines.map((one) => p[one.key] ?? 0))));
    const lowest = Math.min(highest, ...slots.flatMap((p) => lines.map((one) => p[one.key] ?? highest)));
    const scale = axis(lowest, highest, !bars.length, show);
    const x = (at) => PAD.left + ((at - start) / (end - start)) * w;
    const y = (value) => PAD.top + tall - scale.place(value) * tall;
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.setAttribute("aria-label", words(slots));
    const parts = [];
    for (const [value, label] of scale.ticks) {
      parts.push(s("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y(value), y2: y(value) }));
      parts.push(s("text", { class: "tick", x: PAD.left - 6, y: y(value) + 4, "text-anchor": "end" }, label));
    }
    for (const at of moments(start, end, w / 70)) {
      const label = back > 90_000 ? new Date(at).toLocaleDateString([], { weekday: "short", day: "numeric" }) : clock(at).slice(0, 5);
      if (x(at) < width - 24) parts.push(s("text", { class: "tick", x: x(at), y: HEIGHT - 6, "text-anchor": "middle" }, label));
    }
    const barWidth = Math.max(1, (wide / (end - start)) * w - 1);
    for (const p of slots) {
      let floor = 0;
      for (const one of bars) {
        const value = p[one.key] ?? 0;
        if (!value) continue;
        const high = Math.max(1.5, y(floor) - y(floor + value));
        parts.push(s("rect", { class: one.class, x: x(p.at), y: y(floor) - high, width: barWidth, height: high }));
        floor += value;
      }
    }
    for (const one of lines) {
      let path = "";
      let previous = -Infinity;
      for (const p of slots) {
        if (p[one.key] === null || p[one.key] === undefined) continue;
        // A gap in time is a gap in the line.
        const at = x(p.at + wide / 2);
        path += `${p.at - previous > wide * 6 ? "M" : "L"}${at.toFixed(1)} ${y(p[one.key]).toFixed(1)}`;
        if (p.at - previous > wide * 6) parts.push(s("circle", { class: `dot ${one.class}`, cx: at, cy: y(p[one.key]), r: 2 }));
        previous = p.at;
      }
      parts.push(s("path", { class: `line ${one.class}`, d: path || "M0 0" }));
    }
    if (!slots.length) parts.push(s("text", { class: "nothing", x: PAD.left + w / 2, y: PAD.top + tall / 2, "text-anchor": "middle" }, empty));
    svg.replaceChildren(...parts);
    point();
    svg.ostler = { x, wide };
  }

  function words(all) {
    if (!all.length) return `${title}: ${empty}`;
    const newest = all[all.length - 1];
    return `${title}. Newest, ${moment(newest.at)}: ${series.map((one) => `${one.name} ${newest[one.key] === null ? "none" : show(newest[one.key] ?? 0)}`).join(", ")}. Arrow keys move through it.`;
  }

  /** Show what is under the cursor. */
  function point() {
    svg.querySelector(".cursor")?.remove();
    tip.hidden = cursor === null || !slots[cursor];
    if (tip.hidden) return;
    const p = slots[cursor];
    const { x, wide } = svg.ostler ?? {};
    if (!x) return;
    const at = x(p.at + wide / 2);
    svg.append(s("line", { class: "cursor", x1: at, x2: at, y1: PAD.top, y2: HEIGHT - PAD.bottom }));
    text(tip, `${moment(p.at)}\n${series.map((one) => `${one.name}: ${p[one.key] === null || p[one.key] === undefined ? "–" : show(p[one.key])}`).join("\n")}`);
    tip.style.left = `${Math.min(Math.max(0, at + 10), width - 170)}px`;
  }

  svg.addEventListener("pointermove", (event) => {
    const { x, wide } = svg.ostler ?? {};
    if (!x || !slots.length) return;
    const mouse = ((event.clientX - svg.getBoundingClientRect().left) / svg.getBoundingClientRect().width) * width;
    const gaps = slots.map((p) => Math.abs(x(p.at + wide / 2) - mouse));
    cursor = gaps.indexOf(Math.min(...gaps));
    point();
  });
  const leave = () => ((cursor = null), point());
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !slots.length) return;
    event.preventDefault();
    cursor = Math.min(slots.length - 1, Math.max(0, (cursor ?? slots.length) + move));
    point();
  });
  return {
    el,
    update(points, back, step) {
      data = { points, back, step };
      draw();
    },
    redraw: draw,
  };
}

const SUMMED = ["done", "failed", "retried", "crashed", "cancelled", "refused"];

/** Points in wider slots: counts are summed, durations take the largest. */
function gather(points, wide, many) {
  if (many === 1) return points;
  const found = new Map();
  for (const p of points) {
    const at = Math.floor(p.at / wide) * wide;
    const known = found.get(at);
    if (!known) {
      found.set(at, { ...p, at });
      continue;
    }
    for (const [key, value] of Object.entries(p)) {
      if (key === "at" || value === null) continue;
      known[key] = SUMMED.includes(key) ? known[key] + value : Math.max(known[key] ?? 0, value);
    }
  }
  return [...found.values()];
}

export const whole = (value) => count(Math.round(value * 100) / 100);
