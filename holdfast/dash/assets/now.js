// The first screen: does it train now, how fast, since when, and what did that cost?

import { curve, timeBar } from "./charts.js";
import { facts } from "./incidents.js";
import { block, job, onLeave } from "./store.js";
import { capital, clock, count, duration, h, pace, percent, plural, sheet } from "./words.js";

const PILLS = { training: "good", stopping: "bad", probing: "warn", launching: "warn", starting: "warn", waiting: "warn",
  pausing: "warn", held: "warn", ending: "warn" };

export function nowView() {
  return [
    block(["head", "linked", "reading"], headline),
    block(["head"], askedOrHeld),
    block(["head", "causes", "incidents"], tiles),
    block(["spans", "uses"], (view) => sheet("Where the time went", `${duration(view.head.job_s)} since ${clock(view.head.start_at, true)}`, timeBar(view))),
    h("div", { class: "pair" }, curveSheet(), block(["causes"], causes)),
    block(["incidents", "opened"], lastIncident),
  ];
}

function headline(view) {
  const { head } = view;
  const calm = head.over ? (head.code ? "bad" : "good") : !head.watched || job.embedded ? "" : head.said.slow ? "warn" : PILLS[head.phase] || "";
  return h("section", { class: "now", "aria-label": "Now" },
    h("div", { class: "state" },
      h("span", { class: `pill ${calm}${head.watched && job.linked ? " beats" : ""}` }, stateWord(head)),
      h("h1", {}, sentence(head))),
    h("p", { class: "lead" }, presentText(view)));
}

function stateWord(head) {
  if (head.over) return head.code ? `Ended with code ${head.code}` : "Finished";
  if (job.embedded) return `${capital(head.phase)} when this was written`;
  if (!head.watched) return "Not watched";
  return capital(head.phase) + (head.said.slow ? ", slow" : "");
}

function sentence(head) {
  const step = head.step < 0 ? "no step yet" : head.counted === "the last launch"
    ? `${plural(head.step, "step")} since the last launch` : `step ${count(head.step)}`;
  if (head.over || !head.watched) return `${capital(step)}, ${duration(head.job_s)} of run`;
  const since = `since ${clock(head.since, head.end_at - head.since > 86400)} (${duration(head.end_at - head.since)})`;
  if (head.phase !== "training") return `Not training ${since}; ${step}`;
  return `${capital(step)}${head.recent_steps_s ? `, ${pace(head.recent_steps_s)}` : ""}, ${since}`;
}

function presentText({ head, reading }) {
  if (reading) return "Reading the journal: figures are of what was read so far.";
  return capital(head.now);
}

function askedOrHeld({ head }) {
  const { held, asking, asks_until: until, behind, slow } = head.said, said = [];
  if (asking) said.push(h("p", {}, h("b", {}, "A person is asked: "), asking, until ? ` (until ${clock(until)})` : ""));
  if (held) said.push(h("p", {}, h("b", {}, `Held by ${held}. `), "No rank runs until somebody resumes the job."));
  if (head.storage?.missed) said.push(h("p", {}, h("b", {}, "Checkpoints fail: "), head.storage.missed.why));
  if (behind) said.push(h("p", {}, h("b", {}, "Copies are behind: "), behind));
  if (slow) said.push(h("p", {}, h("b", {}, "Slow: "), slow));
  return said.length ? h("section", { class: "sheet alert bad", role: "alert" }, said) : h("div", { hidden: true });
}

function tiles(view) {
  const { head, causes } = view, last = view.incidents[view.incidents.length - 1];
  const speed = head.pace ? `${pace(head.pace.steps / head.pace.seconds)} steady` : "";
  const tokens = head.pace?.tokens_s ? `${count(head.pace.tokens_s)} tokens/s` : "";
  const mfu = head.pace?.mfu ? `MFU ${percent(head.pace.mfu)}` : "";
  const loss = head.loss !== null ? `loss ${Number(head.loss.toPrecision(4))}` : "";
  const hour = head.hour_ettr !== null ? `${head.at_most}${percent(head.hour_ettr)} of the last hour` : "no full hour yet";
  const share = head.job_s > 0 ? `${percent(head.lost_s / head.job_s)} of the time` : "";
  const recovered = head.mttr_s !== null ? `${duration(head.mttr_s)} to recover, on average` : "";
  return h("dl", { class: "tiles" },
    tile("Step", head.step < 0 ? "none" : count(head.step), [speed, tokens, mfu, loss]),
    tile("ETTR, time that made new steps", head.ettr === null ? "not known" : `${head.at_most}${percent(head.ettr)}`, [hour]),
    tile("Time lost", duration(head.lost_s), [share, causes.length ? `most to ${causes[0][0]}` : ""]),
    tile("Incidents", count(head.incidents), [head.open_incident ? "one is open" : "",
      last && !head.open_incident ? `last at ${clock(last.alarm_at, head.end_at - last.alarm_at > 86400)}` : "", recovered]));
}

function tile(name, big, more) {
  const said = more.filter(Boolean).join(" · ");
  return h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, h("div", { class: "big" }, big), h("div", { class: "more" }, said || "\u00a0")));
}

function curveSheet() {
  const place = h("div", {});
  const draw = (view) => {
    const wide = Math.max(280, place.clientWidth || 760);
    const told = view.curve.some((point) => point[2] !== null);
    place.dataset.wide = wide;
    title.textContent = told ? "Loss" : "Steps";
    note.textContent = `${told ? "" : "no loss is known; "}lines mark incidents`;
    return curve(view, wide);
  };
  const title = h("h2", { id: "curve-title" }, "Loss"), note = h("span", { class: "side" });
  const drawn = () => place.replaceChildren(block(["curve", "incidents"], draw));
  requestAnimationFrame(drawn);
  const watch = new ResizeObserver(() => {
    if (place.clientWidth && Math.abs(place.clientWidth - Number(place.dataset.wide || 0)) > 4) drawn();
  });
  watch.observe(place);
  onLeave(() => watch.disconnect());
  return h("section", { class: "sheet", "aria-labelledby": "curve-title" }, h("header", {}, title, note), place);
}

export function causes(view) {
  const most = view.causes.length ? view.causes[0][1] : 1;
  const rows = view.causes.filter(([, seconds]) => seconds > 0).slice(0, 7).map(([cause, seconds]) => h("li", {},
    h("div", { class: "row" }, h("span", {}, capital(cause)), h("span", {}, duration(seconds))),
    h("div", { class: "track" }, h("i", { style: { width: `${(100 * seconds) / most}%` } }))));
  const rest = view.causes.slice(7).reduce((sum, [, seconds]) => sum + seconds, 0);
  return sheet("Lost time by cause", duration(view.head.lost_s),
    rows.length ? h("ul", { class: "causes" }, rows, rest > 0 ? h("li", { class: "soft" }, `and ${duration(rest)} to ${view.causes.length - 7} more causes`) : null)
      : h("p", { class: "soft" }, "Nothing was lost."));
}

function lastIncident(view) {
  const { opened } = view;
  if (opened) {
    return sheet("Open incident", h("a", { href: `#/incidents/${opened.number}` }, "Read its story"),
      h("p", {}, `${capital(opened.cause)}, ${clock(opened.alarm_at, true)}`), h("p", { class: "soft" }, capital(opened.why || "nothing is done yet")));
  }
  const last = view.incidents[view.incidents.length - 1];
  if (!last) return sheet("Last incident", "", h("p", { class: "soft" }, "There was none."));
  const story = h("a", { href: `#/incidents/${last.number}` }, "Read its story");
  return sheet(`Last incident: ${last.label}`, story, facts(last));
}
