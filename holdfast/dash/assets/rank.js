// One rank: its node, what was said of it, its last lines of output, and where it is in its code now.

import { ask, job } from "./store.js";
import { capital, clock, h, plural, quote } from "./words.js";

export function showDialog(title, ...content) {
  const box = h("dialog", { "aria-label": title }, h("h2", {}, title), ...content,
    h("div", { class: "choices" }, h("button", { onclick: () => box.close() }, "Close")));
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
  return box;
}

export function openRank(rank, node, late) {
  const [name, role, first, nproc, host, near, alarms, incidents, last, lag, phase, probes] = node;
  const told = [["Node", name], ["Host", host], ["Place", near.join(" / ")], ["State", role], ["Its ranks", nproc > 1 ? `${first} to ${first + nproc - 1}` : String(first)],
    ["Doing", phase], ["Behind", lag ? plural(lag, "step") : ""], ["Pace", late], ["Named by", alarms ? `${plural(alarms, "alarm")}, ${plural(incidents, "incident")}` : "no alarm"], ["Last said of it", last && capital(last)]];
  const lines = quote("Output", "…"), stacks = h("div", {});
  showDialog(`Rank ${rank}`, h("dl", { class: "facts", style: { marginTop: "12px" } }, told.filter(([, value]) => value).map(([label, value]) =>
    h("div", {}, h("dt", {}, label), h("dd", {}, value)))),
    probes.length ? [h("h3", { style: { marginTop: "16px" } }, "Probes of its node"), h("ul", { class: "undone" }, probes.map((one) =>
      h("li", {}, `${clock(one.at, true)}, ${one.what}: ${one.ok ? "nothing wrong" : one.found}`)))] : null,
    job.embedded ? null : [h("h3", { style: { marginTop: "16px" } }, "Last output"), lines],
    job.view.orders_taken ? h("p", { style: { marginTop: "12px" } }, h("button", { onclick: (event) => fillStacks(stacks, event.target) }, "Look at the stacks of all ranks now")) : null, stacks);
  if (!job.embedded) ask(`rank/${rank}`).then((said) => { lines.textContent = said.lines.join("\n"); }, (error) => { lines.textContent = error.message; });
}

async function fillStacks(place, button) {
  button.disabled = true;
  place.replaceChildren(h("p", { class: "soft" }, "Looking…"));
  try {
    const found = await ask("trace", {});
    place.replaceChildren(h("p", {}, capital(found.reason || "Nobody keeps the others waiting.")), flame(found.boxes),
      ...found.untold.map((text) => h("p", { class: "bad small" }, text)));
  } catch (error) {
    place.replaceChildren(h("p", { class: "bad" }, error.message));
  }
  button.disabled = false;
}

// Boxes as wide as the number of ranks in a frame; the innermost frames are on top.
export function flame(boxes) {
  const total = boxes.reduce((sum, box) => sum + box.count, 0) || 1;
  const draw = (box) => h("div", { class: "box", style: { flex: `${box.count} 1 0` } },
    h("div", { class: `frame${box.named ? " named" : ""}`, title: `${box.frame}: ${box.ranks}` }, `${box.frame} · ${box.ranks}`),
    box.above.length ? h("div", { class: "rowbox" }, box.above.map(draw), rest(box)) : null);
  return h("div", { class: "rowbox flame-root", style: { display: "flex", gap: "1px", alignItems: "flex-end", marginTop: "10px" }, "data-ranks": total }, boxes.map((box) => h("div", { class: "flame", style: { flex: `${box.count} 1 0`, minWidth: 0 } }, draw(box))));
}

function rest(box) {
  const left = box.count - box.above.reduce((sum, one) => sum + one.count, 0);
  return left > 0 ? h("div", { style: { flex: `${left} 1 0` } }) : null;
}
