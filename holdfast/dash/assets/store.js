// The view of the job: fetched whole, then changed by what the server tells; or embedded in a mailed file.

import { enter, fetchWithKey } from "./session.js";
import { properNames } from "./words.js";

export const job = { view: null, version: 0, linked: false, embedded: null };
const watchers = new Set();

export async function openJob() {
  const embedded = document.getElementById("embedded");
  if (embedded) {
    job.embedded = JSON.parse(embedded.textContent);
    job.view = job.embedded.sections;
    return tell(Object.keys(job.view));
  }
  await enter();
  await fetchWhole();
  listen();
}

async function fetchWhole() {
  const answer = await ask("view");
  job.version = answer.version;
  job.view = answer.sections;
  tell(Object.keys(job.view));
}

async function listen() {
  try {
    await hearChanges();
  } catch { /* the server has gone, or has dropped this page */ }
  setLinked(false);
  setTimeout(() => fetchWhole().then(listen, listen), 2000);  // from where this page is, not from where it began
}

async function hearChanges() {
  const answer = await fetchWithKey(`live?after=${job.version}`);
  if (!answer.ok) return;
  setLinked(true);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter(Boolean)) {
      const patch = JSON.parse(line);
      patch.changed ? applyPatch(patch) : await fetchWhole();
    }
  }
}

function setLinked(linked) {
  if (job.linked === linked) return;
  job.linked = linked;
  tell(["linked"]);
}

export function applyPatch(patch) {
  if (patch.version <= job.version) return;
  job.version = patch.version;
  for (const [name, change] of Object.entries(patch.changed)) job.view[name] = applyChange(job.view[name], change);
  tell(Object.keys(patch.changed));
}

function applyChange(value, change) {
  if ("$whole" in change) return change.$whole;
  if ("$fields" in change) return { ...value, ...change.$fields };
  const rows = value.slice(0, change.$length);
  for (const [index, row] of Object.entries(change.$rows)) rows[Number(index)] = row;
  return rows;
}

function tell(names) {
  if (names.includes("nodes")) for (const node of job.view.nodes) properNames.add(node[0]).add(node[4]);
  for (const watcher of [...watchers]) watcher(names);
}

// A piece of the page that is made anew when one of these sections has changed.
export function block(names, make, stays = false) {
  let node = make(job.view);
  const watcher = (changed) => {
    if (!changed.some((name) => names.includes(name))) return;
    node = exchange(node, make(job.view));
  };
  watchers.add(watcher);
  if (!stays) left.push(() => watchers.delete(watcher));
  return node;
}

// Puts a new piece in the place of an old one. What is the same stays, for a click or a selection may be under way, and
// the focus goes to the same element as before. A canvas has to be drawn, and shows no difference.
export function exchange(node, next) {
  if (node.isEqualNode(next) && !next.querySelector("canvas")) return node;
  const focused = node.contains(document.activeElement) ? document.activeElement : null;
  const same = focused && findSame(node, next, focused);
  node.replaceWith(next);
  same?.focus({ preventScroll: true });
  return next;
}

function findSame(node, next, focused) {
  const path = [];
  for (let one = focused; one !== node; one = one.parentElement) path.unshift([...one.parentElement.children].indexOf(one));
  const there = path.reduce((found, index) => found?.children[index], next);
  const named = (one) => [one.tagName, one.getAttribute("href"), one.getAttribute("aria-label"), one.textContent].join("\n");
  if (there && named(there) === named(focused)) return there;
  return [...next.querySelectorAll(focused.tagName)].find((one) => named(one) === named(focused)) || there;
}

const left = [];

export function leaveView() {
  while (left.length) left.pop()();
}

export function onLeave(action) {
  left.push(action);
}

export async function ask(path, body) {
  const options = body ? { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } } : {};
  const answer = await fetchWithKey(path, options);
  const said = await answer.json().catch(() => ({ error: `HTTP ${answer.status}` }));
  if (!answer.ok) throw new Error(said.error || `HTTP ${answer.status}`);
  return said;
}

export async function fetchStory(number) {
  if (!job.embedded) return ask(`story/${number}`);
  const story = job.embedded.stories[number];
  if (!story) throw new Error("this file does not hold the story of so old an incident; holdfast dash shows it");
  return story;
}
