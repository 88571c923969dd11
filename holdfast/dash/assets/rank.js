// One rank or one node: what was said of it, its beats, collectives, last lines of output and stack, and its probes.

import { flame, rankStack } from "./stacks.js";
import { ask, job } from "./store.js";
import { capital, clock, count, duration, h, plural, quote } from "./words.js";

export function showDialog(title, ...content) {
  const box = h("dialog", { "aria-label": title }, h("h2", { tabindex: "-1", autofocus: true }, title), ...content,
    h("div", { class: "choices" }, h("button", { onclick: () => box.close() }, "Close")));
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
  return box;
}

const factList = (told) => h("dl", { class: "facts" }, told.filter(([, value]) => value).map(([label, value]) =>
  h("div", {}, h("dt", {}, label), h("dd", {}, value))));
const part = (title, ...content) => h("section", { class: "part-of", "aria-label": title }, h("h3", {}, title), ...content);
const loading = () => h("p", { class: "soft" }, "Looking…");

function nodeFacts(node) {
  const [name, role, first, nproc, host, near, alarms, incidents, last, lag, phase] = node;
  return [["Host", host === name ? "" : host], ["Place", near.join(" / ")], ["State", role === "ready" ? "standby" : role],
    ["Its ranks", first < 0 ? "none" : nproc > 1 ? `${first} to ${first + nproc - 1}` : String(first)], ["Doing", phase], ["Behind", lag ? plural(lag, "step") : ""],
    ["Named by", [alarms ? plural(alarms, "alarm") : "no alarm", incidents ? plural(incidents, "incident") : ""].filter(Boolean).join(", ")], ["Last said of it", last && capital(last)]];
}

function probeList(node) {
  const probes = [...node[11]].reverse();
  return part("Probes of the node, the newest first", probes.length ? h("ul", { class: "undone probes" }, probes.map((one) =>
    h("li", { class: one.ok ? null : "bad" }, `${clock(one.at, true)}, ${one.what}: ${one.ok ? "nothing wrong" : one.found}`))) : h("p", { class: "soft" }, "There were none."));
}

export function openNode(node) {
  showDialog(`Node ${node[0]}`, factList(nodeFacts(node)), probeList(node));
}

export function openRank(rank, node, late, named) {
  const own = named ? [["Named in", `${named.kind} alarm at ${clock(named.at, true)}: ${named.reason}`]] : [];
  const lines = quote("Output", "…"), live = h("div", {}, loading()), stack = h("div", {}), all = h("div", { class: "part-of" });
  const mayLook = job.view.orders_taken;
  showDialog(`Rank ${rank}`, factList([...own, ["Node", node[0]], ...nodeFacts(node), ["Pace", late]]),
    job.embedded ? null : part("Last heard of it", live),
    mayLook ? part("Its stack now", stack) : null,
    job.embedded ? null : part("Last output", lines),
    node[11].length ? probeList(node) : null,
    mayLook ? h("p", { style: { marginTop: "12px" } }, h("button", { onclick: (event) => fillStacks(all, event.target) }, "Look at the stacks of all ranks now")) : null, all);
  if (job.embedded) return;
  if (mayLook) fillRankStack(stack, rank);
  ask(`rank/${rank}`).then((said) => {
    lines.textContent = said.lines.length ? said.lines.join("\n") : capital(said.absence);
    live.replaceChildren(liveFacts(said.now));
  }, (error) => { lines.textContent = error.message; live.replaceChildren(); });
}

// What the controller knows: beats are those of the node, as a node tells of all its ranks at once.
function liveFacts(now) {
  if (!now) return h("p", { class: "soft" }, "No controller tells of it now.");
  const ago = (seconds) => (seconds === null ? "" : `${duration(seconds)} ago`);
  const step = now.mute ? "it tells of none" : now.step < 0 ? "none yet" : `${count(now.step)}, of the node's slowest rank${now.step_s !== null ? `, since ${duration(now.step_s)}` : ""}`;
  return factList([["Last beat of its node", ago(now.beat_s ?? now.heard_s) || "none yet"], ["Step", step], ["Loss", now.loss === null ? "" : String(Number(now.loss.toPrecision(4)))], ["Doing", now.phase],
    ["Reached last", now.collectives.length ? now.collectives.map((one) => h("div", {}, `collective ${one.number} of group ${one.group}, ${ago(one.ago_s)}`)) : "it reports no collectives"]]);
}

async function fillPlace(place, fetched, show) {
  place.replaceChildren(loading());
  try {
    place.replaceChildren(...show(await fetched));
  } catch (error) {
    place.replaceChildren(h("p", { class: "bad" }, `${capital(error.message)}.`));
  }
}

const fillRankStack = (place, rank) => fillPlace(place, ask("trace", { rank }), (found) => [rankStack(found)]);

async function fillStacks(place, button) {
  button.disabled = true;
  await fillPlace(place, ask("trace", {}), (found) => [h("p", {}, capital(found.reason || "Nobody keeps the others waiting.")), flame(found.rows),
    ...found.untold.map((text) => h("p", { class: "bad small" }, text))]);
  button.disabled = false;
}
