// Incidents: the list, and each as a story from its first signal to its outcome, with what was not done and why.

import { phaseBar } from "./charts.js";
import { countRanks, flame } from "./stacks.js";
import { block, fetchStory, job, onLeave } from "./store.js";
import { capital, clock, count, duration, h, plural, quote, sheet, someNames } from "./words.js";

const PARTS = { signal: "Signal", alarm: "Alarm", echo: "Echo", verdict: "Verdict", action: "Action", outcome: "Outcome",
  order: "Order", news: "News" };
const SHOWN = 500;

export function incidentsView(number) {
  if (number) return [storyPage(Number(number))];
  return [block(["incidents", "opened"], list), block(["changes"], changes)];
}

function list(view) {
  const { opened } = view;
  if (!view.incidents.length && !opened) return sheet("Incidents", "", h("p", { class: "soft" }, "There was none."));
  const shown = view.incidents.slice(-SHOWN).reverse();
  const number = `${count(view.incidents.length)}${opened ? " and one that is open" : ""}`;
  const side = shown.length < view.incidents.length ? `the newest ${SHOWN} of ${number}` : `${number}, the newest first`;
  const long = view.head.end_at - view.head.start_at > 86400;
  const rows = shown.map((one) => h("tr", {},
    h("td", { "data-name": "Incident" }, h("a", { href: `#/incidents/${one.number}`, "aria-label": `Incident ${one.number}` }, String(one.number))),
    h("td", { class: "nowrap soft" }, clock(one.alarm_at, long)),
    h("td", {}, capital(one.cause), h("div", { class: "soft small" }, one.label)),
    h("td", { "data-name": "Done:" }, remedyText(one)),
    h("td", { class: "num", "data-name": "Lost:" }, duration(one.lost_s))));
  if (opened) rows.unshift(h("tr", {},
    h("td", { "data-name": "Incident" }, h("a", { href: `#/incidents/${opened.number}`, "aria-label": `Incident ${opened.number}` }, String(opened.number))),
    h("td", { class: "nowrap soft" }, clock(opened.alarm_at, long)),
    h("td", {}, capital(opened.cause), h("div", { class: "bad small" }, "open")),
    h("td", { "data-name": "Done:" }, capital(opened.why || "nothing yet")), h("td", {}, "")));
  return sheet("Incidents", side, h("div", { class: "scroll" }, h("table", { class: "cards" },
    h("thead", {}, h("tr", {}, ["#", "At", "What failed", "What was done"].map((name) => h("th", { scope: "col" }, name)), h("th", { scope: "col", class: "num" }, "Lost"))),
    h("tbody", {}, rows))));
}

function changes(view) {
  if (!view.changes.length) return h("div", { hidden: true });
  const rows = [...view.changes].reverse().slice(0, SHOWN).map((one) => h("tr", {},
    h("td", { class: "nowrap soft" }, clock(one.at, true)), h("td", {}, capital(one.why), wentOn(one) ? h("div", { class: "soft small" }, wentOn(one)) : null),
    h("td", { "data-name": "Release:" }, String(one.release)), h("td", { class: "num", "data-name": "Lost:" }, duration(one.lost_s))));
  return sheet("Planned restarts", String(view.changes.length), h("table", { class: "cards" },
    h("thead", {}, h("tr", {}, ["At", "Why", "Release"].map((name) => h("th", { scope: "col" }, name)), h("th", { scope: "col", class: "num" }, "Lost"))),
    h("tbody", {}, rows)));
}

function remedyText(one) {
  const swapped = [...one.left, one.admitted.length ? `admitted ${someNames(one.admitted)}` : ""].filter(Boolean);
  return capital([one.remedy === "evict" && swapped.length ? "" : one.remedy, ...swapped, wentOn(one)].filter(Boolean).join(", "));
}

// Ranks that were not started anew, and a job that uses fewer nodes until others come.
const wentOn = (one) => [one.stayed, one.short].filter(Boolean).join(", ");

// What failed, where, why we think so, what was done, what it cost: the same five facts wherever an incident is shown.
export function facts(one) {
  const ranks = one.ranks.length ? `${one.ranks.length === 1 ? "rank" : "ranks"} ${someNames(one.ranks.map(String))}` : "";
  const where = [someNames(one.nodes), ranks].filter(Boolean).join(", ") || "no node is named";
  const from = one.resumed_from !== null ? `; went on from step ${count(one.resumed_from)}` : "";
  const redone = one.redo_s ? `, then ${one.lost_steps ? plural(one.lost_steps, "step") : "steps"} redone in ${duration(one.redo_s)}` : "";
  const at = one.good_step >= 0 ? `at step ${count(one.good_step)}, ` : "before any step, ";
  return h("dl", { class: "facts" },
    fact("What failed", h("span", {}, `${capital(one.cause)}.`), "wide"),
    fact("Where and when", `${capital(where)}, ${at}${clock(one.alarm_at, true)}`),
    fact("Why this was done", capital(one.why) + (one.guess ? " (on evidence short of proof)" : "")),
    fact("What was done", `${remedyText(one)}${one.remedy === "give up" ? "" : from}`),
    fact("What it cost", [h("b", {}, duration(one.lost_s)), redone ? `: ${duration(one.lost_s - one.redo_s)} without a step${redone}` : ""]));
}

const fact = (name, value, size = "") => h("div", { class: size }, h("dt", {}, name), h("dd", {}, value));

function storyPage(number) {
  const place = h("div", { style: { display: "flex", flexDirection: "column", gap: "18px" } });
  let there = true, shown = "";
  const fill = async () => {
    try {
      const story = await fetchStory(number);
      const text = JSON.stringify([story, job.view.incidents[number - 1], job.view.opened]);
      if (!there || text === shown) return;  // who reads it may have opened or selected something
      shown = text;
      place.replaceChildren(...storyOf(number, story));
    } catch (error) {
      if (there) place.replaceChildren(sheet(`Incident ${number}`, backLink(), h("p", {}, error.message)));
    }
  };
  onLeave(() => { there = false; });
  fill();
  const isOpen = () => number > job.view.incidents.length;
  block(["incidents", "head"], () => {
    if (isOpen() || place.dataset.open) fill();
    place.dataset.open = isOpen() ? "yes" : "";
    return h("span", {});
  });
  return place;
}

const backLink = () => h("a", { href: "#/incidents" }, "All incidents");

function storyOf(number, story) {
  const one = job.view.incidents[number - 1];
  const began = one ? one.good_at : story.lines[0]?.at ?? 0;
  const head = one ? sheet(`Incident ${number}: ${one.label}`, siblings(number), facts(one), h("div", { style: { height: "18px" } }), phaseBar(one.redo_s ? { ...one.phases_s, redo: one.redo_s } : one.phases_s))
    : sheet(`Incident ${number} is open`, backLink(), h("p", {}, capital(job.view.opened?.cause || job.view.head.now)),
      job.view.opened?.why ? h("p", { class: "soft" }, capital(job.view.opened.why)) : null);
  const note = one ? `times since the last good step, ${clock(one.good_at)}` : "so far";
  const parts = [head, sheet("What happened", note, h("ol", { class: "story" }, foldEchoes(story.lines).map((line) => storyLine(line, began))),
    story.left_out ? h("p", { class: "soft" }, `${plural(story.left_out, "more line")} of this long incident are in the journal.`) : null)];
  if (story.undone.length) parts.push(sheet("What was not done, and why", "", h("ul", { class: "undone" }, story.undone.map((text) => h("li", {}, text)))));
  if (story.logs?.length) parts.push(sheet("What ranks printed last before it", story.logs.some((log) => log.lines) ? "err marks stderr, out stdout" : "", logParts(story.logs)));
  return parts;
}

function logParts(logs) {
  if (logs.some((log) => log.lines)) return logs.map(logPart);
  return [...new Set(logs.map((log) => log.absence))].map((why) => h("p", { class: "soft" }, `${capital(why)}.`));
}

function logPart(log) {
  const name = `Rank ${log.rank}`;
  return h("div", { class: "log" }, h("h3", {}, name), log.lines ? quote(`Output of rank ${log.rank}`, log.lines.join("\n")) : h("p", { class: "soft" }, `${capital(log.absence)}.`));
}

function siblings(number) {
  const link = (to, text) => job.view.incidents[to - 1] ? h("a", { href: `#/incidents/${to}` }, text) : null;
  return h("span", { style: { display: "inline-flex", gap: "14px" } }, link(number - 1, "Before"), link(number + 1, "After"), backLink());
}

// Many ranks say at once that another one failed: one line tells of them all.
function foldEchoes(lines) {
  const found = [];
  for (const line of lines) {
    const before = found[found.length - 1];
    if (line.part === "echo" && before?.part === "echo") before.more.push(line.text);
    else found.push(line.part === "echo" ? { ...line, more: [] } : line);
  }
  return found;
}

function storyLine(line, began) {
  const failed = line.part === "outcome" && line.ok === false ? " failed" : "";
  const more = line.more?.length ? h("details", {}, h("summary", { class: "soft small" }, `and ${plural(line.more.length, "more rank")} that only felt it`),
    h("ul", {}, line.more.map((text) => h("li", {}, text)))) : null;
  return h("li", {},
    h("span", { class: "when" }, h("span", { title: clock(line.at, true) }, sinceText(line.at - began))),
    h("span", { class: `part ${line.part}${failed}` }, PARTS[line.part] || line.part),
    h("div", { class: "what" }, capital(line.text), more,
      line.remarks?.length ? h("ul", {}, line.remarks.map((text) => h("li", {}, capital(text)))) : null,
      line.evidence?.length ? quote("Evidence", line.evidence.join("\n")) : null,
      line.stacks?.length ? h("details", { open: line.part === "alarm" }, h("summary", { class: "soft small" }, `Where ${plural(countRanks(line.stacks), "rank")} stood then`), flame(line.stacks)) : null));
}

const sinceText = (seconds) => `${seconds < 0 ? "−" : "+"}${duration(Math.abs(seconds))}`;
