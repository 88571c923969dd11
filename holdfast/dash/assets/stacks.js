// Stacks: of all ranks as a flame picture with the ranks of each frame, or of one rank as a list of frames.

import { capital, duration, h, plural, quote } from "./words.js";

const OUTER = 12; // frames that all ranks share: more of them are drawn as one
const PLACES = 12;
const STATES = { R: "running", S: "asleep", D: "in the kernel, and cannot be interrupted", T: "stopped by a signal", t: "stopped by a debugger", Z: "ended", X: "gone" };

// Rows come in the order of a tree, each before the frames that it calls.
function growBoxes(rows) {
  const root = { count: 0, above: [] }, way = [root];
  for (const [depth, frame, ranks, count, named, here] of rows) {
    const box = { frame, ranks: ranks || plural(count, "rank"), count, named, here, above: [] };
    way.length = depth + 1;
    way[depth].above.push(box);
    way.push(box);
  }
  root.count = root.above.reduce((sum, box) => sum + box.count, 0);
  return root;
}

// Outer frames that every rank is in say little, and would take most of the picture.
function joinOuter(root) {
  let box = root, shared = [];
  while (box.above.length === 1 && box.above[0].count === root.count) shared.push(box = box.above[0]);
  if (!box.above.length) shared.pop();
  if (shared.length <= OUTER) return root.above;
  const last = shared[shared.length - 1];
  return [{ ...last, frame: `${shared.length} outer frames, to ${last.frame}`, title: shared.map((one) => one.frame).join(" › ") }];
}

const stopsHere = (box) => box.count - box.above.reduce((sum, one) => sum + one.count, 0);

function places(root) {
  const found = [];
  const walk = (box) => {
    const stopped = stopsHere(box);
    if (stopped > 0 && box !== root) found.push({ ...box, stopped });
    box.above.forEach(walk);
  };
  walk(root);
  return found.sort((a, b) => b.named - a.named || b.stopped - a.stopped);
}

// Boxes as wide as the number of ranks in a frame, the innermost on top; and the same as a list, which can be read aloud.
export function flame(rows) {
  const root = growBoxes(rows), found = places(root);
  if (!root.count) return h("p", { class: "soft" }, "No stack could be read.");
  const draw = (box) => h("div", { class: "box", style: { flex: `${box.count} 1 0` } },
    h("div", { class: `frame${box.named ? " named" : ""}`, title: `${box.title || box.frame}: ${box.ranks}` }, `${box.frame} · ${box.ranks}`),
    box.above.length ? h("div", { class: "rowbox" }, box.above.map(draw), stopsHere(box) > 0 ? h("div", { style: { flex: `${stopsHere(box)} 1 0` } }) : null) : null);
  const list = found.slice(0, PLACES).map((box) => h("li", { class: box.named ? "bad" : null },
    h("b", {}, capital(box.here || box.ranks)), " ", h("code", {}, box.frame)));
  return h("div", { class: "stacks" },
    h("ul", { class: "places" }, list, found.length > PLACES ? h("li", { class: "soft" }, `and ${plural(found.length - PLACES, "more place")}`) : null),
    h("div", { class: "flame", role: "img", "aria-label": `Stacks of ${plural(root.count, "rank")}, merged; the list above names the innermost frames`, "data-ranks": root.count },
      h("div", { class: "rowbox" }, joinOuter(root).map(draw))));
}

export const countRanks = (rows) => rows.reduce((sum, [depth, , , count]) => sum + (depth ? 0 : count), 0);

// One rank's own stack, the innermost frame first, and what it waits for.
export function rankStack(found) {
  const said = found.collectives.map((one) => h("li", {}, one.inside
    ? `In ${one.op || "collective"} ${one.number} of group ${one.group}${one.since_s ? ` for ${duration(one.since_s)}` : ""}`
    : `Has ended ${one.op || "collective"} ${one.number} of group ${one.group}${one.since_s ? `, which it entered ${duration(one.since_s)} ago` : ""}`));
  return h("div", {}, h("p", {}, `Its process is ${STATES[found.state] || "there"}.`), said.length ? h("ul", { class: "undone" }, said) : null,
    found.frames.length ? quote(`Stack of rank ${found.rank}`, [...found.frames].reverse().join("\n")) : h("p", { class: "bad" }, `${capital(found.absence)}.`));
}
