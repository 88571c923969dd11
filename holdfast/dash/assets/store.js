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
    const next = make(job.view);
    node.replaceWith(next);
    node = next;
  };
  watchers.add(watcher);
  if (!stays) left.push(() => watchers.delete(watcher));
  return node;
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
