// The page: its head, and the view that the address names.

import { forgetColours } from "./charts.js";
import { incidentsView } from "./incidents.js";
import { nowView } from "./now.js";
import { jobOrders } from "./orders.js";
import { ranksView } from "./ranks.js";
import { block, job, leaveView, openJob } from "./store.js";
import { nodesView, releasesView, settingsView } from "./tables.js";
import { timelineView } from "./timeline.js";
import { announce, count, h, svg } from "./words.js";

const VIEWS = { now: ["Now", nowView], incidents: ["Incidents", incidentsView], ranks: ["Ranks", ranksView], timeline: ["Timeline", timelineView],
  nodes: ["Nodes", nodesView], releases: ["Releases", releasesView], settings: ["Settings", settingsView] };

function shownPlace() {
  const [, name = "now", rest = ""] = location.hash.split("/");
  return { name: name in VIEWS ? name : "now", rest };
}

function showView(focus) {
  const { name, rest } = shownPlace(), main = document.getElementById("main");
  leaveView();
  forgetColours();
  const parts = VIEWS[name][1](rest), title = rest ? `Incident ${rest}` : VIEWS[name][0];
  main.replaceChildren(...(name === "now" ? [] : [h("h1", { class: "unseen" }, title)]), ...parts);
  for (const link of document.querySelectorAll("nav a"))
    link.dataset.view === name ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  document.title = `${VIEWS[name][0]} · ${job.view.head.run_id || "holdfast"}`;
  if (focus) { main.focus({ preventScroll: true }); scrollTo(0, 0); }
}

function showHead() {
  const mark = svg("svg", { viewBox: "0 0 32 32", "aria-hidden": "true" }, svg("rect", { width: 32, height: 32, rx: 7, fill: "#0f766e" }),
    svg("path", { d: "M10 7v18M22 7v18M10 16h12", stroke: "#fff", "stroke-width": 3.4, "stroke-linecap": "round", fill: "none" }));
  const links = Object.entries(VIEWS).map(([name, [title]]) => h("a", { href: `#/${name}`, "data-view": name }, title));
  document.getElementById("head").replaceChildren(h("div", { class: "bar" },
    h("span", { class: "brand" }, mark, "holdfast"), block(["head"], runText, true), jobOrders(), themeButton(), h("nav", { "aria-label": "Views" }, links)));
}

const runText = ({ head }) => h("span", { class: "run" }, [head.run_id, head.ranks ? `${count(head.ranks)} ranks` : ""].filter(Boolean).join(" · "));

function themeButton() {
  const isDark = () => getComputedStyle(document.documentElement).colorScheme.includes("dark");
  const button = h("button", { class: "plain", "aria-label": "Light or dark", title: "Light or dark" }, "◐");
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    showView(false);
  });
  return button;
}

async function start() {
  try {
    await openJob();
  } catch (error) {
    document.getElementById("main").replaceChildren(h("p", { class: "wait", role: "alert" }, `The page cannot read the job: ${error.message}.`));
    return;
  }
  showHead();
  showView(false);
  addEventListener("hashchange", () => showView(true));
  let phase = job.view.head.phase;
  block(["head"], ({ head }) => {
    if (head.phase !== phase) announce(`The job is ${head.phase}`);
    phase = head.phase;
    return h("span", {});
  }, true);
}

start();
