// Numbers and times in words, as all commands of holdfast write them, and elements of the page.

export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  setAll(node, props);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

export function svg(tag, props = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setAll(node, props);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function setAll(node, props) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
}

export function duration(seconds) {
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  const whole = Math.floor(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
  if (!hours) return `${minutes} min ${String(whole % 60).padStart(2, "0")} s`;
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  return `${hours} h ${String(minutes).padStart(2, "0")} min`;
}

export function clock(at, withDay = false) {
  const date = new Date(at * 1000);
  const time = date.toLocaleTimeString("en-GB");
  if (!withDay) return time;
  return `${date.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}`;
}

export const count = (number) => Math.round(number).toLocaleString("en");
export const percent = (part) => `${(100 * part).toFixed(1)} %`;
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Sentences begin with a capital letter, but names of nodes and hosts are written as they are.
export const properNames = new Set();
export function capital(text) {
  const [first] = text.split(/[\s,:;]/, 1);
  return /^[a-z-]+$/.test(first) && !properNames.has(first) ? text.charAt(0).toUpperCase() + text.slice(1) : text;
}

export function pace(stepsPerSecond) {
  if (stepsPerSecond >= 0.1) return `${Number(stepsPerSecond.toPrecision(3))} steps/s`;
  return `${Number((1 / stepsPerSecond).toPrecision(3))} s a step`;
}

export function someNames(names, most = 4) {
  if (names.length <= most + 1) return names.join(", ");
  return `${names.slice(0, most).join(", ")} and ${names.length - most} more`;
}

export function sheet(title, side, ...content) {
  const id = `t${sheet.next = (sheet.next || 0) + 1}`;
  const head = h("header", {}, h("h2", { id }, title), side ? h("span", { class: "side" }, side) : null);
  return h("section", { class: "sheet", "aria-labelledby": id }, head, ...content);
}

// Lines of somebody else's, which the keyboard can scroll.
export const quote = (label, ...lines) => h("pre", { tabindex: "0", role: "group", "aria-label": label }, ...lines);

export function announce(text) {
  const said = document.getElementById("said");
  if (said.textContent !== text) said.textContent = text;
}
