// Tables: nodes and standbys, releases, checkpoints, orders of people, settings.

import { order } from "./orders.js";
import { openNode, showDialog } from "./rank.js";
import { ask, block, exchange, job } from "./store.js";
import { capital, clock, count, duration, h, quote, sheet } from "./words.js";

const SHOWN = 100, SHOWN_NARROW = 30;  // rows; on a phone each is as tall as a card
const HERE = ["active", "admitting", "draining", "ready", "probing"];
let wanted = "";

function table(columns, rows) {
  const names = columns.map((name) => h("th", { scope: "col", class: name.endsWith(" ") ? "num" : null }, name.trim()));
  return h("div", { class: "scroll" }, h("table", { class: "cards" }, h("thead", {}, h("tr", {}, names)), h("tbody", {}, rows)));
}

const cell = (value, name = "", kind = "") => h("td", { class: kind || null, "data-name": name || null }, value);

export function nodesView() {
  let rows = nodeTable(job.view);
  const fill = () => { rows = exchange(rows, nodeTable(job.view)); };
  const filter = h("input", { type: "search", value: wanted, "aria-label": "Filter nodes", placeholder: "Filter: name, host or state", oninput: (event) => {
    wanted = event.target.value.toLowerCase();
    fill();
  } });
  block(["nodes", "orders_taken"], () => { requestAnimationFrame(fill); return h("span", {}); });
  return [block(["head"], roles), sheet("Nodes", filter, rows)];
}

function roles({ head }) {
  const said = Object.entries(head.roles).map(([role, number]) => `${count(number)} ${role === "ready" ? (number === 1 ? "standby" : "standbys") : role}`);
  return h("p", { class: "soft" }, said.join(", ") || "No node has come yet.");
}

function nodeTable(view) {
  const found = view.nodes.filter((node) => !wanted || [node[0], node[4], node[1], node[5].join(" ")].some((text) => text.toLowerCase().includes(wanted)));
  const sorted = [...found].sort((a, b) => b[7] - a[7] || b[6] - a[6] || a[0].localeCompare(b[0], "en", { numeric: true }));
  const rows = sorted.slice(0, innerWidth > 640 ? SHOWN : SHOWN_NARROW).map((node) => h("tr", {}, cell(h("button", { class: "name", title: "All that is known of it", onclick: () => openNode(node) }, node[0])), cell(node[1] === "ready" ? "standby" : node[1], "", "nowrap"),
    cell(node[2] < 0 ? "" : node[3] > 1 ? `${node[2]} to ${node[2] + node[3] - 1}` : String(node[2]), node[2] < 0 ? "" : "Ranks:", "nowrap"),
    cell([node[4], ...node[5]].filter(Boolean).join(" / "), node[4] ? "Host:" : ""), cell(node[7] ? count(node[7]) : "", node[7] ? "Incidents:" : "", "num"),
    cell(node[6] ? count(node[6]) : "", node[6] ? "Alarms:" : "", "num"), cell([node[10] || node[8] || "", probesText(node[11])], ""), job.view.orders_taken ? cell(nodeOrders(node), "") : null));
  const left = found.length - rows.length;
  return h("div", {}, table(["Node", "State", "Ranks", "Host", "Incidents ", "Alarms ", "Last said of it", job.view.orders_taken ? "Orders" : null].filter((name) => name !== null), rows),
    left > 0 ? h("p", { class: "soft small" }, `${count(left)} more; those with incidents come first. Filter to find one.`) : null);
}

function probesText(probes) {
  const last = probes[probes.length - 1];
  if (!last) return "";
  return h("div", { class: last.ok ? "soft small" : "bad small" }, `${last.what} at ${clock(last.at, true)}: ${last.ok ? "nothing wrong" : last.found}`);
}

function nodeOrders(node) {
  if (!job.view.orders_taken || !HERE.includes(node[1])) return "";
  return h("span", { class: "nowrap" }, ["drain", "evict"].map((verb) => h("button", { class: "plain", "aria-label": `${capital(verb)} ${node[0]}`, onclick: () => order(verb, node[0]) }, capital(verb))));
}

export function releasesView() {
  return [block(["releases", "paces"], (view) => sheet("Releases", "", table(["#", "Brought", "From", "By", "Steps ", "Pace"],
    view.releases.map((one) => h("tr", {}, cell(String(one.number), "Release"), cell(clock(one.at, true), "", "nowrap soft"), cell([one.source, one.message ? h("div", { class: "soft small" }, one.message) : ""]),
      cell(one.who, one.who ? "By:" : "", "nowrap"), cell(`${count(one.steps)}${one.redone ? ` and ${count(one.redone)} redone` : ""}`, "Steps:", "num"), cell([one.pace, differenceButton(view.releases, one)], "")))),
    view.paces.filter((said) => !view.releases.some((one) => one.pace === said)).map((said) => h("p", { class: "soft small" }, said)))),
  block(["stored", "head"], checkpoints), block(["orders"], orders)];
}

function differenceButton(releases, one) {
  const before = releases[releases.indexOf(one) - 1];
  if (!before || job.embedded) return "";
  return h("div", {}, h("button", { class: "plain", onclick: () => showDifference(before.number, one.number) }, `What changed since release ${before.number}`));
}

async function showDifference(before, number) {
  const place = h("div", {}, h("p", { class: "soft" }, "Looking…"));
  showDialog(`Release ${number} against release ${before}`, place);
  try {
    const { lines, left_out: left } = await ask(`release/${number}`);
    place.replaceChildren(quote("Difference", ...lines.map((line) => h("span", { class: { "+": "good", "-": "bad" }[line[0]] || null }, line, "\n"))),
      left ? h("p", { class: "soft small" }, `${count(left)} more lines or files are left out.`) : "");
  } catch (error) {
    place.replaceChildren(h("p", {}, `${capital(error.message)}.`));
  }
}

function checkpoints(view) {
  const { floor, copies, disk } = view.head.said, storage = view.head.storage;
  const tiers = [["Memory of peers", floor ? `step ${count(floor)} is held by every rank and by ${copies > 1 ? "two peers" : "its peer"}` : ""], ["Disks of nodes", disk ? `step ${count(disk)} lies on the disks of all nodes` : ""],
    ["Storage", storage && storage.step >= 0 ? `step ${count(storage.step)}, written ${clock(storage.at, true)}` : ""]];
  const told = tiers.filter(([, said]) => said).map(([name, said]) => h("div", {}, h("dt", {}, name), h("dd", {}, said)));
  return sheet("Checkpoints by tier", "", told.length ? h("dl", { class: "facts" }, told) : h("p", { class: "soft" }, "No node has told of any."),
    storage?.missed ? h("p", { class: "bad" }, `Later ones were not written: ${storage.missed.why}`) : null,
    view.stored.length ? h("p", { class: "soft small", style: { marginTop: "10px" } }, `Written: ${view.stored.slice(-12).filter((one) => one.step >= 0).map((one) => `step ${count(one.step)} at ${clock(one.at)}`).join(", ")}`) : null);
}

function orders(view) {
  if (!view.orders.length) return sheet("Orders of people", "", h("p", { class: "soft" }, "There were none."));
  return sheet("Orders of people", "", table(["At", "Who", "What"], [...view.orders].reverse().map(([at, who, what]) => h("tr", {}, cell(clock(at, true), "", "nowrap soft"), cell(who), cell(what)))));
}

export function settingsView() {
  const rows = (value) => Object.entries(value || {}).filter(([, one]) => one !== "" && (typeof one !== "object" || one?.length)).map(([name, one]) =>
    h("tr", {}, h("td", { class: "mono" }, name), h("td", {}, name.endsWith("_s") ? duration(one) : String(one))));
  return [sheet("The job as it was asked for", "", table(["Name", "Value"], rows(job.view.job))),
    sheet("Limits of the decider", h("span", {}, "docs/SETTINGS.md explains each"), table(["Name", "Value"], rows(job.view.limits)))];
}
