// All metrics of the runs over their steps, in groups; the usual ones first.

import * as api from "mtrl/api";
import { Chart } from "mtrl/chart";
import { debounced, fill, h, plural, shortNames } from "mtrl/dom";
import { hidden, live, meaning, runColour, set, state } from "mtrl/state";

const USUAL = ["reward/overall", "reward/success_rate", "val/avg@", "val/reward_score", "response_length/mean", "actor/entropy", "reward/mean", "tokens/mean", "reward", "completions/mean_length", "entropy"];
const RATES = ["reward/success_rate", "reward/accuracy", "val/reward/accuracy", "val/avg@", "val/pass@", "val/by_"];
const ORDER = ["reward", "val", "actor", "critic", "attention", "response_length", "rollout", "replay", "data", "perf"];
const METRICS_PER_REQUEST = 12;

export class Curves {
  constructor() {
    this.charts = new Map(); // metric -> Chart
    this.data = new Map(); // "run metric" -> {steps, values, version}
    this.search = h("input", { type: "search", placeholder: "search metrics  ( / )", "aria-label": "search metrics", oninput: debounced(() => set({ search: this.search.value })) });
    this.smooth = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, "aria-label": "smoothing", oninput: () => set({ smooth: Number(this.smooth.value) }) });
    this.smoothText = h("output", {});
    this.count = h("span", { class: "quiet" });
    this.body = h("div", { class: "sections" });
    const bar = h("div", { class: "toolbar" }, this.search, h("label", {}, "smoothing", this.smooth, this.smoothText), h("span", { class: "grow" }), this.count);
    this.node = h("section", { class: "curves" }, bar, this.body);
    this.layoutKey = "";
  }

  refresh() {
    this.search.value = state.search;
    this.smooth.value = state.smooth;
    this.layout();
    this.load();
  }

  changed(keys) {
    if (keys.has("search")) this.layout();
    this.load();
  }

  names() {
    const all = new Set(live.runs.flatMap((run) => run.metrics));
    const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
    return [...all].filter((name) => words.every((word) => name.toLowerCase().includes(word))).sort();
  }

  /** Sections and their charts, rebuilt only when the set of metrics changes. */
  layout() {
    const names = this.names();
    const key = names.join("\n");
    if (key === this.layoutKey) return;
    this.layoutKey = key;
    for (const chart of this.charts.values()) chart.drop();
    this.charts.clear();
    const usual = state.search ? [] : USUAL.map((start) => names.find((name) => name === start || (start.endsWith("@") && name.startsWith(start)))).filter(Boolean);
    const groups = new Map(usual.length ? [["Overview", [...new Set(usual)]]] : []);
    for (const name of names) {
      const prefix = name.includes("/") ? name.split("/")[0] : "other";
      groups.set(prefix, [...(groups.get(prefix) ?? []), name]);
    }
    const rank = (name) => (name === "Overview" ? -1 : ORDER.includes(name) ? ORDER.indexOf(name) : ORDER.length);
    const sections = [...groups].sort(([a], [b]) => rank(a) - rank(b));
    fill(this.body, sections.map(([title, members]) => this.section(title, members)), names.length ? null : h("p", { class: "empty" }, live.runs.length ? "No metric matches the search." : "No runs."));
    fill(this.count, plural(names.length, "metric"));
  }

  section(title, names) {
    const key = (name) => `${title} ${name}`;
    const charts = names.map((name) => {
      const chart = new Chart(name, { help: meaning(name), bounds: RATES.some((start) => name.startsWith(start)) ? [0, 1] : null });
      chart.metric = name;
      this.charts.set(key(name), chart);
      return chart.node;
    });
    return h("details", { open: true }, h("summary", {}, title, h("span", { class: "quiet" }, ` ${names.length}`)), h("div", { class: "grid" }, charts));
  }

  async load() {
    fill(this.smoothText, state.smooth ? state.smooth.toFixed(2) : "off");
    this.draw();
    const wanted = [...new Set([...this.charts.values()].map((chart) => chart.metric))];
    await Promise.all(live.runs.map((run, number) => this.fetch(number, run, wanted.filter((name) => run.metrics.includes(name)))));
  }

  /** Requests the missing metrics, a dozen at a time, in the order of the page. */
  async fetch(number, run, names) {
    const stale = names.filter((name) => this.data.get(`${number} ${name}`)?.version !== run.last_step + run.metrics.length);
    for (let start = 0; start < stale.length; start += METRICS_PER_REQUEST) {
      const some = stale.slice(start, start + METRICS_PER_REQUEST);
      try {
        for (const [name, [steps, values]] of Object.entries(await api.series(number, some)))
          this.data.set(`${number} ${name}`, { steps, values, version: run.last_step + run.metrics.length });
      } catch {
        return; // the next poll tries again
      }
      this.draw(new Set(some));
    }
  }

  draw(only = null) {
    const names = shortNames(live.runs.map((run) => run.name));
    for (const chart of this.charts.values()) {
      if (only && !only.has(chart.metric)) continue;
      const lines = live.runs.map((run, number) => ({ name: names[number], colour: runColour(number), number, ...this.data.get(`${number} ${chart.metric}`) }));
      chart.show(lines.filter((line) => line.steps && !hidden.has(line.number)), { smooth: chart.metric.startsWith("val/") ? 0 : state.smooth });
    }
  }

  repaint() {
    this.draw();
  }
}
