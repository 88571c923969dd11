// The timeline of spans: zoom with the wheel, the buttons or the keys, drag to move, and read what a stretch held.

import { drawSpans, spanColour, timeLabel, timeTicks, usesLegend } from "./charts.js";
import { block, exchange, job, onLeave } from "./store.js";
import { announce, clock, duration, h, sheet } from "./words.js";

const LEAST_S = 0.5, SHOWN = 60, LABEL = 45;  // the half of a label of the axis, in pixels

export function timelineView() {
  const { start_at: start } = job.view.head;
  let end = job.view.head.end_at;
  const shown = { from: start, until: end };
  const canvas = h("canvas", { style: { width: "100%", height: "120px", display: "block", touchAction: "pan-y", cursor: "grab", borderRadius: "7px" },
    tabindex: "0", role: "application", "aria-label": "Timeline. Plus and minus zoom, arrow keys move, 0 shows all." });
  const axis = h("div", { style: { position: "relative", height: "20px" }, class: "small soft", "aria-hidden": "true" });
  const range = h("span", { class: "side" }), legend = h("div", {});
  let rows = h("div", {}), asked = false;
  const paint = () => {
    const { from, until } = shown, spans = job.view.spans;
    drawSpans(canvas, spans, from, until);
    const wide = canvas.clientWidth || 600;
    axis.replaceChildren(...timeTicks(from, until, Math.max(2, Math.floor(wide / 130))).map((at) => {
      const part = (at - from) / (until - from), edge = LABEL / wide;  // a label stays within the picture
      return h("span", { style: { position: "absolute", left: `${part * 100}%`, transform: `translateX(${part < edge ? 0 : part > 1 - edge ? -100 : -50}%)`, whiteSpace: "nowrap" } }, timeLabel(at, until - from));
    }));
    range.textContent = `${clock(from, true)} to ${clock(until, true)}, ${duration(until - from)}`;
    if (asked) announce(range.textContent);  // not when it moves by itself
    asked = false;
    const inside = spans.filter((span) => span[2] > from && span[1] < until);
    rows = exchange(rows, spanTable(inside));
    legend.replaceChildren(usesLegend(sumUses(inside, from, until)));
  };
  const show = (from, until) => {
    const whole = job.view.head.end_at - start, long = Math.min(Math.max(until - from, LEAST_S), whole);
    shown.from = Math.min(Math.max(from, start), start + whole - long);
    shown.until = shown.from + long;
    requestAnimationFrame(paint);
  };
  const choose = (from, until) => { asked = true; show(from, until); };
  const zoom = (factor, at = (shown.from + shown.until) / 2) => choose(at - (at - shown.from) * factor, at + (shown.until - at) * factor);
  const move = (part) => choose(shown.from + part * (shown.until - shown.from), shown.until + part * (shown.until - shown.from));
  const all = () => choose(start, job.view.head.end_at);
  listen(canvas, shown, { zoom, move, all, show });
  const watch = new ResizeObserver(() => requestAnimationFrame(paint));
  watch.observe(canvas);
  onLeave(() => watch.disconnect());
  requestAnimationFrame(paint);
  block(["spans", "head"], () => {
    const now = job.view.head.end_at, later = now - end;
    if (later && shown.until >= end) show(shown.from > start ? shown.from + later : start, now);  // it follows a job that runs
    end = now;
    return h("span", {});
  });
  const button = (text, label, action) => h("button", { "aria-label": label, title: label, onclick: action }, text);
  return [h("section", { class: "sheet", "aria-label": "Timeline" }, h("header", {}, h("h2", {}, "Timeline"), range),
    h("div", { class: "tools" }, button("+", "Zoom in", () => zoom(0.5)), button("−", "Zoom out", () => zoom(2)),
      button("←", "Earlier", () => move(-0.5)), button("→", "Later", () => move(0.5)), button("All", "Show all", all),
      h("label", {}, "Incident", h("select", { onchange: (event) => {
        const one = job.view.incidents[Number(event.target.value) - 1];
        if (one) choose(one.good_at - 0.15 * (one.resumed_at - one.good_at), one.resumed_at + 0.15 * (one.resumed_at - one.good_at));
      } }, h("option", { value: "" }, "choose"), job.view.incidents.slice(-500).map((one) => h("option", { value: one.number }, `${one.number} ${one.label}`))))),
    canvas, axis, legend), sheet("What it held", "", rows)];
}

function listen(canvas, shown, { zoom, move, all, show }) {
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = canvas.getBoundingClientRect(), at = shown.from + ((event.clientX - box.left) / box.width) * (shown.until - shown.from);
    zoom(event.deltaY > 0 ? 1.25 : 0.8, at);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (down) => {
    const { from, until } = shown, wide = canvas.clientWidth;
    const drag = (event) => {
      const shift = ((down.clientX - event.clientX) / wide) * (until - from);
      show(from + shift, until + shift);
    };
    canvas.setPointerCapture(down.pointerId);
    canvas.addEventListener("pointermove", drag);
    canvas.addEventListener("pointerup", () => canvas.removeEventListener("pointermove", drag), { once: true });
  });
  const keys = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25), 0: all };
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
}

function sumUses(spans, from, until) {
  const sums = new Map();
  for (const [use, start, end] of spans) sums.set(use, (sums.get(use) || 0) + Math.min(end, until) - Math.max(start, from));
  return [...sums].sort((a, b) => b[1] - a[1]);
}

function spanTable(spans) {
  const shown = spans.slice(-SHOWN).reverse();
  const rows = shown.map(([use, start, end, incident, change]) => h("tr", {},
    h("td", { class: "nowrap" }, h("span", { class: "dot", style: { display: "inline-block", marginRight: "8px", background: spanColour(use) } }), use),
    h("td", { class: "soft nowrap" }, clock(start, true)), h("td", { class: "num" }, duration(end - start)),
    h("td", {}, incident ? h("a", { class: "nowrap", href: `#/incidents/${incident}` }, h("span", { class: "spare" }, "incident "), String(incident)) : change ? `planned restart ${change}` : "")));
  return h("div", { class: "scroll" }, spans.length > SHOWN ? h("p", { class: "soft small" }, `The last ${SHOWN} of ${spans.length} spans; zoom in for the others.`) : null,
    h("table", { class: "spans" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Use"), h("th", { scope: "col" }, "From"), h("th", { scope: "col", class: "num" }, "Lasted"), h("th", { scope: "col" }, "Incident"))), h("tbody", {}, rows)));
}
