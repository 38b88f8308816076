// The frame of the page: header, tabs, keys, and polling of live runs.

import * as api from "mtrl/api";
import { redrawAll } from "mtrl/chart";
import { fill, h, plural, shortNames } from "mtrl/dom";
import { Curves } from "mtrl/curves";
import { Rollouts } from "mtrl/rollouts";
import { RunPage } from "mtrl/timing";
import { HEATS } from "mtrl/heat";
import { hidden, live, notify, onChange, readAddress, runColours, set, state } from "mtrl/state";

const POLL_MS = 2000;
const TABS = [["curves", "Curves"], ["rollouts", "Rollouts"], ["run", "Run"]];
const KEYS = [
  ["→ or j, ← or k", "next, previous response"],
  ["] and [", "next, previous step"],
  [`1 … ${HEATS.length}`, `heat map: ${HEATS.map((heat) => heat.label).join(", ")}`],
  ["Tab to a token, → and ←", "move between tokens: their numbers and attention"],
  ["g", "group: all responses to the prompt"],
  ["c, r, i", "curves, rollouts, about the run"],
  ["/", "search the metrics, or go to the first filter"],
  ["t", "light or dark"],
  ["?", "these keys"],
];

const views = { curves: new Curves(), rollouts: new Rollouts(), run: new RunPage() };
const legend = h("div", { class: "runs" });
const badge = h("span", { class: "badge" });
const notes = h("div", { class: "notes", hidden: true });
const main = h("main");
const tabs = TABS.map(([key, name]) => h("button", { class: "tab", dataset: { tab: key }, onclick: () => set({ tab: key }) }, name));
const help = h("dialog", { class: "help" }, h("h2", {}, "Keys"), h("dl", {}, KEYS.map(([keys, action]) => [h("dt", {}, keys), h("dd", {}, action)])), h("form", { method: "dialog" }, h("button", {}, "Close")));

function buildFrame() {
  const theme = h("button", { class: "icon", title: "light or dark (t)", "aria-label": "light or dark", onclick: switchTheme }, "◐");
  const keys = h("button", { class: "icon", title: "keys (?)", "aria-label": "keys", onclick: () => help.showModal() }, "?");
  const header = h("header", { class: "top" }, h("span", { class: "brand" }, "mtrl"), h("nav", {}, tabs), legend, badge, theme, keys);
  fill(document.getElementById("app"), header, notes, main, help);
}

function showTab() {
  for (const tab of tabs) tab.setAttribute("aria-current", tab.dataset.tab === state.tab);
  const view = views[state.tab];
  if (main.firstChild !== view.node) fill(main, view.node);
  view.refresh();
}

function showRuns() {
  const names = shortNames(live.runs.map((run) => run.name));
  fill(legend, live.runs.map((run, number) => {
    const dot = h("i", { style: { background: `var(${runColours[number % runColours.length]})` } });
    const button = h("button", { class: "run", title: `${run.name}\n${run.path}\nclick: show or hide`, "aria-pressed": !hidden.has(number) }, dot, h("span", {}, names[number]));
    button.addEventListener("click", () => {
      hidden.has(number) ? hidden.delete(number) : hidden.add(number);
      showRuns();
      notify(["hidden"]);
    });
    return button;
  }));
  const isLive = live.runs.some((run) => run.live) && !api.isReport;
  const last = Math.max(0, ...live.runs.map((run) => run.last_step));
  badge.className = `badge ${live.error ? "lost" : isLive ? "live" : ""}`;
  fill(badge, live.error || `${isLive ? "live · " : ""}step ${last.toLocaleString("en")}`);
  const messages = live.runs.flatMap((run) => run.skipped.map((text) => (live.runs.length > 1 ? `${run.name}: ${text}` : text)));
  notes.hidden = !messages.length;
  fill(notes, messages.map((text) => h("p", {}, text)));
}

let lastRuns = "";
async function poll() {
  try {
    const found = (await api.runs()).runs;
    const isKnown = (metric) => Object.hasOwn(live.glossary, metric);
    if (!found.every((run) => run.metrics.every(isKnown))) live.glossary = await api.glossary();
    live.runs = found;
    live.error = "";
    const runs = JSON.stringify(live.runs);
    const first = !lastRuns;
    if (runs !== lastRuns) {
      lastRuns = runs;
      showRuns();
      first ? showTab() : views[state.tab].refresh();
    }
  } catch {
    live.error = "the server does not respond: is mtrl view still running?";
    showRuns();
  }
  if (!api.isReport) setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("mtrl-theme", root.dataset.theme);
  } catch { /* a report may have no storage */ }
  redraw();
}

function redraw() {
  redrawAll();
  for (const view of Object.values(views)) view.repaint?.();
}

function onKey(event) {
  const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) && event.target.type !== "range";
  if (event.key === "Escape" && typing) event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  const jump = { c: "curves", r: "rollouts", i: "run" }[event.key];
  if (jump) set({ tab: jump });
  else if (event.key === "t") switchTheme();
  else if (event.key === "?") help.showModal();
  else if (event.key === "/") main.querySelector("input:not([type=range]):not([type=checkbox])")?.focus();
  else if (!views[state.tab].key?.(event.key)) return;
  event.preventDefault();
}

function start() {
  try {
    document.documentElement.dataset.theme = localStorage.getItem("mtrl-theme") ?? "";
  } catch { /* as above */ }
  readAddress();
  buildFrame();
  if (api.isReport && api.about) document.title = `mtrl report: ${plural(api.about.steps, "step")}`;
  addEventListener("keydown", onKey);
  addEventListener("hashchange", () => {
    readAddress();
    showTab();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  onChange((changed) => (changed.has("tab") ? showTab() : views[state.tab].changed(changed)));
  poll();
}

start();
