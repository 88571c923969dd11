// Pictures of the job's time: the bar of spans, and the curve of losses with marks of incidents.

import { capital, clock, colour, count, duration, h, svg } from "./words.js";

const MARKS_WITH_NUMBER = 30, ROOM = 30; // pixels from one mark to the next that its number needs
const TALL = 250, LEFT = 56, RIGHT = 12, TOP = 26, BOTTOM = 26;

export function drawSpans(canvas, spans, from, until) {
  const wide = Math.max(1, canvas.clientWidth || canvas.parentElement?.clientWidth || 600);
  const tall = canvas.clientHeight || 30, scale = devicePixelRatio || 1;
  canvas.width = wide * scale;
  canvas.height = tall * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const shares = sharesOfPixels(spans, from, until, wide);
  for (let x = 0; x < wide; x++) {
    let y = tall;
    for (const [use, share] of shares[x]) {
      const height = share * tall;
      pen.fillStyle = spanColour(use);
      pen.fillRect(x, y - height, 1.5, height);
      y -= height;
    }
  }
}

// Of each pixel, which uses took which share: a short incident in a long run stays visible as a sliver.
function sharesOfPixels(spans, from, until, wide) {
  const each = (until - from) / wide, found = Array.from({ length: wide }, () => new Map());
  for (const [use, start, end] of spans) {
    if (end <= from || start >= until) continue;
    const first = Math.max(0, Math.floor((start - from) / each)), last = Math.min(wide - 1, Math.floor((end - from) / each));
    for (let x = first; x <= last; x++) {
      const shared = Math.min(end, from + (x + 1) * each) - Math.max(start, from + x * each);
      if (shared > 0) found[x].set(use, (found[x].get(use) || 0) + shared / each);
    }
  }
  return found.map((shares) => [...shares].sort((a, b) => (a[0] === "train") - (b[0] === "train") || b[1] - a[1]));
}

const colours = new Map();
export function spanColour(use) {
  if (!colours.has(use)) colours.set(use, colour(use) || colour("bar"));
  return colours.get(use);
}
export const forgetColours = () => colours.clear();

export function timeBar(view) {
  const { start_at: from, end_at: until } = view.head;
  const canvas = h("canvas", { role: "img", "aria-label": usesInWords(view.uses) });
  requestAnimationFrame(() => drawSpans(canvas, view.spans, from, until));
  const long = until - from > 86400;
  return h("div", {},
    h("a", { class: "times", href: "#/timeline", title: "Open the timeline" }, canvas),
    h("div", { class: "ends" }, h("span", {}, clock(from, long)), h("span", {}, clock(until, long))),
    usesLegend(view.uses));
}

export function usesLegend(uses) {
  return h("ul", { class: "legend" }, uses.map(([use, seconds]) =>
    h("li", {}, h("span", { class: "dot", style: { background: spanColour(use) } }), use, h("b", {}, duration(seconds)))));
}

const usesInWords = (uses) => `Wall time by use: ${uses.map(([use, s]) => `${use} ${duration(s)}`).join(", ")}`;

// The loss over time or, where nobody tells losses, the step.
export function curve(view, wide) {
  const { start_at: from, end_at: until } = view.head;
  const losses = view.curve.filter((point) => point[2] !== null);
  const field = losses.length ? 2 : 1, points = losses.length ? losses : view.curve;
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${wide} ${TALL}`, height: TALL, role: "group",
    "aria-label": `${field === 2 ? "Loss" : "Step"} over time, with ${view.incidents.length} incidents` });
  if (!points.length || until <= from) {
    picture.append(svg("text", { x: LEFT, y: TALL / 2 }, "No step was seen yet."));
    return picture;
  }
  const values = points.map((point) => point[field]);
  const ticks = niceTicks(Math.min(...values), Math.max(...values), 4);
  const low = ticks[0], high = ticks[ticks.length - 1];
  const x = (at) => LEFT + ((at - from) / (until - from)) * (wide - LEFT - RIGHT);
  const y = (value) => TALL - BOTTOM - ((value - low) / (high - low)) * (TALL - TOP - BOTTOM);
  for (const tick of ticks) {
    picture.append(svg("line", { class: "grid", x1: LEFT, x2: wide - RIGHT, y1: y(tick), y2: y(tick) }));
    const said = field === 1 ? count(tick) : String(Number(tick.toPrecision(4)));
    picture.append(svg("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, said));
  }
  for (const at of timeTicks(from, until, Math.max(2, Math.floor(wide / 150))))
    picture.append(svg("text", { x: x(at), y: TALL - 6, "text-anchor": "middle" }, timeLabel(at, until - from)));
  picture.append(...marks(view.incidents, x));
  picture.append(svg("path", { class: "curve", d: pathOf(points, field, x, y) }));
  return picture;
}

// A line breaks where a generation ends: what was between is no training.
function pathOf(points, field, x, y) {
  let path = "", generation = -1;
  for (const point of points) {
    path += `${point[3] === generation ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[field]).toFixed(1)}`;
    if (point[3] !== generation) path += "h0.1";
    generation = point[3];
  }
  return path;
}

function marks(incidents, x) {
  const numbered = incidents.length <= MARKS_WITH_NUMBER, found = [];
  let last = -9;
  for (const [n, one] of incidents.entries()) {
    const at = x(one.good_at), next = incidents[n + 1] ? x(incidents[n + 1].good_at) : Infinity;
    if (!numbered && at < last + 3) continue;
    last = at;
    found.push(svg("line", { class: numbered ? "mark" : "mark many", x1: at, x2: at, y1: TOP - 6, y2: TALL - BOTTOM }));
    const label = `Incident ${one.number}: ${one.label}, ${duration(one.lost_s)} lost`;
    if (numbered) found.push(svg("a", { href: `#/incidents/${one.number}`, "aria-label": label },
      svg("title", {}, label), svg("circle", { cx: at, cy: TOP - 8, r: 5 }),
      next - at > ROOM ? svg("text", { x: at + 8, y: TOP - 4 }, String(one.number)) : null));
  }
  return found;
}

export function niceTicks(low, high, wanted) {
  if (!(high > low)) [low, high] = [low - (Math.abs(low) || 1) * 0.05, low + (Math.abs(low) || 1) * 0.05];
  const raw = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const ticks = [];
  for (let tick = Math.floor(low / step) * step; tick < high + step * 0.999; tick += step) ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}

const STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 1209600];

export function timeTicks(from, until, most) {
  const shift = new Date(from * 1000).getTimezoneOffset() * 60;
  let number = STEPS_S.findIndex((one) => (until - from) / one <= most), ticks = [];
  for (number = number < 0 ? STEPS_S.length - 1 : number; number >= 0 && !ticks.length; number--) {  // a round time may lie outside
    const step = STEPS_S[number];
    for (let at = Math.ceil((from - shift) / step) * step + shift; at <= until; at += step) ticks.push(at);
  }
  return ticks.slice(0, 60);
}

export function timeLabel(at, range) {
  const date = new Date(at * 1000);
  if (range > 3 * 86400) return date.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  const said = date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: range < 600 ? "2-digit" : undefined });
  return range > 86400 ? `${date.getDate()}. ${said}` : said;
}

const PHASE_COLOURS = { detect: "detect", silence: "silence", "last step": "pause", stop: "stop", probe: "probe", ask: "ask", hold: "hold",
  wait: "wait", launch: "launch", "failed start": "stall", "start broken off": "stall", pause: "pause", "imports and groups": "start-up", "imports and restore": "start-up",
  restore: "pause", "first step": "run", redo: "redo" };

export function phaseBar(phases) {
  const shown = Object.entries(phases).filter(([, seconds]) => seconds > 0);
  const colourOf = (name) => spanColour(PHASE_COLOURS[name] || "bar");
  return h("div", {},
    h("div", { class: "phases", "aria-hidden": "true" }, shown.map(([name, seconds]) =>
      h("i", { title: `${name} ${duration(seconds)}`, style: { flexGrow: seconds, flexBasis: 0, background: colourOf(name) } }))),
    h("ul", { class: "legend" }, shown.map(([name, seconds]) =>
      h("li", {}, h("span", { class: "dot", style: { background: colourOf(name) } }), capital(name), h("b", {}, duration(seconds))))));
}
