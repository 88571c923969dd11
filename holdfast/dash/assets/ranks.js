// The grid of ranks: one cell each, on a canvas, so that 16,384 of them stay readable and quick.

import { forgetColours } from "./charts.js";
import { openRank } from "./rank.js";
import { block, job, onLeave } from "./store.js";
import { announce, capital, colour, count, h, plural, sheet } from "./words.js";

const ROLES = { active: "train", admitting: "start-up", draining: "launch", ready: "bar", probing: "probe", evicted: "detect",
  examined: "probe", lost: "detect", dismissed: "stop", acquiring: "wait", queued: "wait" };
const HEAT = { light: ["#e7ecef", "#f7d9a8", "#ee9f5b", "#d1453b", "#8f1d2c"], dark: ["#2a3138", "#5c4a22", "#a8682a", "#d1453b", "#ff8f85"] };
const SIGNS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", LEAST = -11, MOST = 50;  // percent of the time, as the controller writes them
const LATE = [2, 7, 14, 29, MOST];  // upper ends, in percent; from 8 on a rank is named as slow
const NAMED = { crash: "detect", hang: "stall", slow: "launch", loss: "redo" };  // the colour of a rank that an alarm of this kind names
const chosen = { colour: "state", group: "node" };

export function ranksView() {
  const dims = job.view.head.mesh.map(([name]) => name);
  const near = job.view.nodes.some((node) => node[5].length);
  const canvas = h("canvas", { tabindex: "0", role: "application", "aria-label": "Grid of ranks. Arrow keys move, Enter opens a rank." });
  const tip = h("div", { class: "tip", hidden: true }), legend = h("ul", { class: "legend" }), side = h("span", { class: "side" });
  const grid = { canvas, tip, legend, side, cells: [], at: 0, columns: 1, size: 10 };
  const paint = () => paintGrid(grid);
  const pick = (name, options) => h("label", {}, name === "colour" ? "Colour by" : "Group by", h("select", { onchange: (event) => {
    chosen[name] = event.target.value;
    paint();
  } }, options.map(([value, text]) => h("option", { value, selected: chosen[name] === value }, text))));
  const groups = [["node", "node"], ["host", "host"], ...(near ? [["near", "switch"]] : []), ...dims.map((name, n) => [`dim${n}`, `${name} group`])];
  const tools = h("div", { class: "tools" },
    pick("colour", [["state", "state"], ["incidents", "incidents of the node"], ["alarms", "alarms of the node"], ["lag", "steps the node is behind"], ["late", "time between collectives"]]),
    pick("group", groups));
  listenToGrid(grid);
  requestAnimationFrame(paint);
  const watch = new ResizeObserver(paint);
  requestAnimationFrame(() => watch.observe(canvas.parentElement));
  onLeave(() => { watch.disconnect(); tip.remove(); });
  block(["nodes", "named", "lateness"], () => { requestAnimationFrame(paint); return h("span", {}); });
  document.body.append(tip);
  return [h("section", { class: "sheet", "aria-label": "Ranks" }, h("header", {}, h("h2", {}, "Ranks"), side), tools,
    h("div", { class: "gridwrap" }, canvas), legend)];
}

function cellsOf(view) {
  const sizes = view.head.mesh.map(([, size]) => size), cells = [];
  const named = new Map(view.named.flatMap(([ranks, kind, at, reason]) => ranks.map((rank) => [rank, { kind, at, reason }])));
  for (const node of view.nodes) {
    if (node[2] < 0) continue;
    for (let rank = node[2]; rank < node[2] + node[3]; rank++) cells.push({ rank, node, named: named.get(rank), group: groupOf(node, rank, sizes) });
  }
  cells.sort((a, b) => a.rank - b.rank);
  if (chosen.group !== "node") cells.sort((a, b) => compareNames(a.group, b.group) || a.rank - b.rank);
  return cells;
}

const compareNames = (a, b) => String(a).localeCompare(String(b), "en", { numeric: true });

function groupOf(node, rank, sizes) {
  if (chosen.group === "host") return node[4] || node[0];
  if (chosen.group === "near") return node[5].join(" / ") || "not told";
  if (!chosen.group.startsWith("dim")) return node[0];
  // Over ranks the last dimension varies fastest. A group is the ranks that differ in this dimension alone.
  const dim = Number(chosen.group.slice(3)), places = [];
  let rest = rank;
  for (let n = sizes.length - 1; n >= 0; n--) { places[n] = rest % sizes[n]; rest = Math.floor(rest / sizes[n]); }
  return places.map((place, n) => (n === dim ? "*" : place)).join(".");
}

function paintGrid(grid) {
  const { canvas } = grid, view = job.view, cells = cellsOf(view);
  grid.cells = cells;
  grid.side.textContent = `${plural(cells.length, "rank")} on ${plural(view.nodes.filter((node) => node[2] >= 0).length, "node")}`;
  if (!canvas.parentElement || !cells.length) return;
  forgetColours();
  const wide = canvas.parentElement.clientWidth;
  layOut(grid, wide);
  const scale = devicePixelRatio || 1, last = grid.spots[cells.length - 1], tall = last.y + grid.size + 4;
  canvas.style.width = `${wide}px`;
  canvas.style.height = `${tall}px`;
  canvas.width = wide * scale;
  canvas.height = tall * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const shade = shades(cells);
  cells.forEach((cell, n) => {
    pen.fillStyle = shade.of(cell);
    const spot = grid.spots[n];
    pen.fillRect(spot.x, spot.y, grid.size - 1, grid.size - 1);
    if (cell.named && chosen.colour === "state") markNamed(pen, spot, grid.size - 1);
    if (!grid.head || !spot.isFirst) return;
    pen.fillStyle = colour("soft");
    pen.font = "12px system-ui, sans-serif";
    pen.fillText(cell.group, spot.x, spot.y - 5);
  });
  grid.legend.replaceChildren(...shade.legend.map(([fill, text]) => h("li", {}, h("span", { class: "dot", style: { background: fill } }), text)));
  drawCursor(grid, pen);
}

// Not by its colour alone: a rank that an alarm names has a mark in its middle.
function markNamed(pen, spot, size) {
  const third = Math.max(2, Math.round(size / 3)), inset = (size - third) / 2;
  pen.fillStyle = colour("sheet");
  pen.fillRect(spot.x + inset, spot.y + inset, third, third);
}

// Cells of one group stand together. A group that does not fit into a row begins the next, if it fits there.
function layOut(grid, wide) {
  const total = grid.cells.length, sizes = new Map();
  for (const cell of grid.cells) sizes.set(cell.group, (sizes.get(cell.group) || 0) + 1);
  grid.size = total > 8192 ? 8 : total > 2048 ? 10 : total > 512 ? 14 : total > 64 ? 20 : 30;
  grid.head = total <= 512 ? 17 : 0;  // a name above each group
  const gap = grid.head ? 14 : 3, row = grid.size + (grid.head ? grid.head + 8 : 1);
  let x = 0, y = 0, group = null;
  grid.spots = grid.cells.map((cell) => {
    const isNew = cell.group !== group, needed = grid.size * (isNew ? sizes.get(cell.group) : 1);
    if (isNew && group !== null) x += gap;
    if (x > 0 && x + Math.min(needed, wide) > wide) { x = 0; y += row; }
    group = cell.group;
    const spot = { x, y: y + grid.head, isFirst: isNew };
    x += grid.size;
    return spot;
  });
}

function shades(cells) {
  if (chosen.colour === "state") {
    const found = new Map(), fills = {};
    for (const cell of cells) {
      const state = stateOf(cell);
      found.set(state, (found.get(state) || 0) + 1);
      fills[state] ||= colour(cell.named ? NAMED[cell.named.kind] || "probe" : ROLES[state] || "bar");
    }
    return { of: (cell) => fills[stateOf(cell)], legend: [...found].map(([state, number]) => [fills[state], `${state} ${count(number)}`]) };
  }
  const dark = getComputedStyle(document.documentElement).colorScheme.includes("dark");
  const steps = HEAT[dark ? "dark" : "light"];
  if (chosen.colour === "late") return lateShades(cells, steps);
  const field = { incidents: 7, alarms: 6, lag: 9 }[chosen.colour];
  const most = Math.max(1, ...cells.map((cell) => cell.node[field]));
  const level = (value) => (value === 0 ? 0 : Math.min(4, 1 + Math.floor((3.999 * (value - 1)) / Math.max(1, most))));
  const bounds = steps.map((fill, n) => {
    const inside = cells.map((cell) => cell.node[field]).filter((value) => level(value) === n);
    return inside.length ? [fill, Math.min(...inside) === Math.max(...inside) ? String(inside[0]) : `${Math.min(...inside)} to ${Math.max(...inside)}`] : null;
  });
  return { of: (cell) => steps[level(cell.node[field])], legend: bounds.filter(Boolean) };
}

// A rank that an alarm names has a state of its own; of the others the node's is known.
const stateOf = (cell) => (cell.named ? `named in a ${cell.named.kind} alarm` : cell.node[1]);

// How much longer than the median of its groups a rank takes from one collective to the next, in percent of the time.
export function latePercent(rank) {
  const place = SIGNS.indexOf(job.view.lateness[rank >> 6]?.[rank & 63] || ".");
  return place < 0 ? null : LEAST + place;
}

export function lateText(rank) {
  const percent = latePercent(rank);
  if (percent === null) return "";
  const size = `${Math.abs(percent)} %${percent === MOST || percent === LEAST ? " or more" : ""}`;
  return percent ? `takes ${size} of the time ${percent > 0 ? "longer" : "less"} between collectives than the median` : "as long between collectives as the median";
}

function lateShades(cells, steps) {
  const level = (percent) => LATE.findIndex((end) => percent <= end), numbers = LATE.map(() => 0), untold = colour("bar");
  let unknown = 0;
  for (const cell of cells) {
    const percent = latePercent(cell.rank);
    if (percent === null) unknown++;
    else numbers[level(percent)]++;
  }
  const ends = LATE.map((end, n) => (n === 0 ? `up to ${end} % of the time longer than the median` : n === LATE.length - 1 ? `${LATE[n - 1] + 1} % or more` : `${LATE[n - 1] + 1} to ${end} %`));
  const legend = ends.map((text, n) => [steps[n], `${text}: ${count(numbers[n])}`]).filter((_, n) => numbers[n]);
  if (unknown) legend.push([untold, `not known: ${count(unknown)}${legend.length ? "" : "; only the controller of a job that trains and reports collectives tells it"}`]);
  return { of: (cell) => { const percent = latePercent(cell.rank); return percent === null ? untold : steps[level(percent)]; }, legend };
}

function drawCursor(grid, pen) {
  const spot = grid.spots[grid.at];
  if (!spot || document.activeElement !== grid.canvas) return;
  pen.strokeStyle = colour("ink");
  pen.lineWidth = 2;
  pen.strokeRect(spot.x - 1, spot.y - 1, grid.size + 1, grid.size + 1);
}

function listenToGrid(grid) {
  const { canvas, tip } = grid;
  canvas.addEventListener("mousemove", (event) => showTip(grid, findCell(grid, event), event));
  canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
  canvas.addEventListener("click", (event) => {
    const found = findCell(grid, event);
    if (found >= 0) openCell(grid.cells[found]);
  });
  canvas.addEventListener("focus", () => paintGrid(grid));
  canvas.addEventListener("blur", () => paintGrid(grid));
  canvas.addEventListener("keydown", (event) => {
    const rowLength = grid.spots.filter((spot) => spot.y === grid.spots[grid.at]?.y).length;
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: rowLength, ArrowUp: -rowLength, Home: -grid.at, End: grid.cells.length - 1 - grid.at };
    if (event.key === "Enter" && grid.cells[grid.at]) return openCell(grid.cells[grid.at]);
    if (!(event.key in moves)) return undefined;
    event.preventDefault();
    grid.at = Math.max(0, Math.min(grid.cells.length - 1, grid.at + moves[event.key]));
    announce(cellText(grid.cells[grid.at]));
    return paintGrid(grid);
  });
}

const openCell = (cell) => openRank(cell.rank, cell.node, capital(lateText(cell.rank)), cell.named);

function findCell(grid, event) {
  const box = grid.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  return (grid.spots || []).findIndex((spot) => x >= spot.x && x < spot.x + grid.size && y >= spot.y && y < spot.y + grid.size);
}

function cellText(cell) {
  const [node, , , , , , alarms, incidents, , lag] = cell.node;
  return [`rank ${cell.rank} on ${node}`, stateOf(cell), incidents ? plural(incidents, "incident") : "", alarms ? plural(alarms, "alarm") : "",
    lag ? `${plural(lag, "step")} behind` : "", chosen.colour === "late" ? lateText(cell.rank) : ""].filter(Boolean).join(", ");
}

function showTip(grid, index, event) {
  grid.tip.hidden = index < 0;
  if (index < 0) return;
  grid.tip.textContent = cellText(grid.cells[index]);
  grid.tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 240)}px`;
  grid.tip.style.top = `${event.clientY + 16}px`;
}
