// About a run: its time and memory by phase, and its configuration.

import * as api from "mtrl/api";
import { Chart } from "mtrl/chart";
import { fill, h, number, seconds } from "mtrl/dom";
import { live, meaning, runColours, set, state, colour } from "mtrl/state";

const SECONDS = "perf/seconds_";
const MEMORY = "perf/peak_gb_";
const NO_PHASE = ["step", "validation"];

export class RunPage {
  constructor() {
    this.time = new Chart("seconds by phase", { stacked: true, height: 240, format: seconds });
    this.memory = new Chart("peak memory by phase, GB", { height: 240 });
    this.run = h("select", { "aria-label": "run", onchange: () => set({ run: Number(this.run.value) }) });
    this.table = h("div", { class: "card" });
    this.config = h("pre", { class: "config" });
    this.path = h("p", { class: "quiet" });
    const charts = h("div", { class: "grid wide" }, this.time.node, this.memory.node);
    this.bar = h("div", { class: "toolbar" }, this.run, this.path);
    this.node = h("section", { class: "about" }, this.bar, charts, this.table, h("details", {}, h("summary", {}, "configuration"), this.config));
  }

  changed(keys) {
    if (keys.has("run")) this.refresh();
  }

  async refresh() {
    const run = live.runs[state.run];
    if (!run) return;
    this.run.hidden = live.runs.length < 2;
    if (this.run.children.length !== live.runs.length) fill(this.run, live.runs.map((each, index) => h("option", { value: index }, each.name)));
    this.run.value = state.run;
    fill(this.path, run.path);
    const phases = run.metrics.filter((name) => name.startsWith(SECONDS) && !NO_PHASE.includes(name.slice(SECONDS.length)));
    const peaks = run.metrics.filter((name) => name.startsWith(MEMORY));
    try {
      this.data = await api.series(state.run, [...phases, ...peaks, `${SECONDS}step`, "perf/tokens_per_second"]);
      if (this.configRun !== state.run) fill(this.config, (await api.config(state.run)) || "no config.yaml");
      this.configRun = state.run;
    } catch {
      return;
    }
    this.names = { phases, peaks };
    this.repaint();
  }

  repaint() {
    if (!this.data) return;
    const { phases, peaks } = this.names;
    const ink = (index) => colour(runColours[index % runColours.length]);
    this.time.show(stackPhases(phases, this.data, ink));
    this.memory.show(peaks.map((name, index) => ({ name: name.slice(MEMORY.length), colour: ink(index), steps: this.data[name][0], values: this.data[name][1] })));
    const mean = (name) => (this.data[name]?.[1].length ? this.data[name][1].reduce((a, b) => a + b, 0) / this.data[name][1].length : null);
    const whole = mean(`${SECONDS}step`);
    const rows = phases.map((name, index) => [ink(index), name.slice(SECONDS.length), mean(name), mean(MEMORY + name.slice(SECONDS.length))]).sort((a, b) => b[2] - a[2]);
    fill(this.table, h("h3", {}, "Average step"), h("table", {}, h("thead", {}, h("tr", {}, ["phase", "seconds", "share", "peak GB"].map((name) => h("th", {}, name)))), h("tbody", {},
      rows.map(([paint, name, time, peak]) => h("tr", {}, h("td", { title: meaning(SECONDS + name) }, h("i", { class: "dot", style: { background: paint } }), name), h("td", {}, seconds(time)), h("td", {}, whole ? h("span", { class: "meter" }, h("i", { style: { width: `${(100 * time) / whole}%`, background: paint } })) : "", whole ? time / whole < 0.01 ? " < 1%" : ` ${Math.round((100 * time) / whole)}%` : ""), h("td", { title: meaning(MEMORY + name) }, number(peak)))),
      h("tr", { class: "sum" }, h("td", { title: meaning(`${SECONDS}step`) }, "whole step"), h("td", {}, seconds(whole)), h("td", { title: meaning("perf/tokens_per_second") }, `${number(mean("perf/tokens_per_second"))} tokens/s`), h("td", {})))));
    this.table.hidden = !phases.length;
  }
}

/** The phases stacked, at the steps of the phase with the fewest steps. */
function stackPhases(names, data, ink) {
  if (!names.length) return [];
  const steps = names.map((name) => data[name][0]).reduce((a, b) => (a.length <= b.length ? a : b));
  const below = new Array(steps.length).fill(0);
  return names.map((name, index) => {
    const by = new Map(data[name][0].map((step, i) => [step, data[name][1][i]]));
    const values = steps.map((step) => by.get(step) ?? 0);
    const bottom = [...below];
    values.forEach((value, i) => (below[i] += value));
    return { name: name.slice(SECONDS.length), colour: ink(index), steps, values, bottom, top: [...below] };
  });
}
