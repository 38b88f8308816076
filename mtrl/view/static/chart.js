// Curves on a canvas: the steps pale, their running mean strong, and a cross-hair that all charts share.

import { fill, h, number } from "mtrl/dom";
import { colour } from "mtrl/state";

const MARGIN = { left: 46, right: 12, top: 10, bottom: 22 };
const charts = new Set();
let hovered = null; // the step under the pointer

/** The exponential moving average; weight 0 leaves the values as they are. */
export function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

/** Round numbers within a range, about `count` at most. */
export function ticks(low, high, count) {
  const span = high - low || 1;
  const rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const numbers = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) numbers.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return numbers;
}

export class Chart {
  /** lines: [{name, colour, steps, values, dashed}]; options: {smooth, bounds, height, stacked, format, help} */
  constructor(title, options = {}) {
    this.options = { height: 190, smooth: 0, format: number, ...options };
    this.lines = [];
    this.canvas = h("canvas", { style: { height: `${this.options.height}px` } });
    this.tip = h("div", { class: "chart-tip", hidden: true });
    this.latest = h("span", { class: "latest" });
    this.node = h("figure", { class: "chart" }, h("figcaption", {}, h("span", { class: "title", title: [title, this.options.help].filter(Boolean).join("\n") }, title), this.latest), h("div", { class: "plot" }, this.canvas, this.tip));
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => setHovered(null));
    this.isVisible = false;
    this.visibility = new IntersectionObserver((entries) => {
      this.isVisible = entries.some((entry) => entry.isIntersecting);
      if (this.isVisible) this.draw();
    });
    this.visibility.observe(this.canvas);
    this.size = new ResizeObserver(() => this.draw());
    this.size.observe(this.canvas);
    charts.add(this);
  }

  drop() {
    charts.delete(this);
    this.visibility.disconnect();
    this.size.disconnect();
  }

  show(lines, changes = {}) {
    Object.assign(this.options, changes);
    this.lines = lines.filter((line) => line.steps.length);
    this.means = this.lines.map((line) => (line.dashed || this.options.stacked ? line.values : smooth(line.values, this.options.smooth)));
    const only = this.lines.length === 1 ? this.lines[0] : null;
    fill(this.latest, only ? this.options.format(only.values.at(-1)) : "");
    this.draw();
  }

  extent() {
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const line of this.lines) {
      x0 = Math.min(x0, line.steps[0]);
      x1 = Math.max(x1, line.steps.at(-1));
      for (const value of line.top ?? line.values) {
        if (value < y0) y0 = value;
        if (value > y1) y1 = value;
      }
    }
    if (this.options.stacked) y0 = 0;
    if (this.options.bounds) [y0, y1] = [Math.min(y0, this.options.bounds[0]), Math.max(y1, this.options.bounds[1])];
    else if (y0 >= 0 && y0 <= y1 / 2) y0 = 0;
    if (y0 === y1) [y0, y1] = [y0 - Math.abs(y0 || 1) / 2, y1 + Math.abs(y1 || 1) / 2];
    const margin = this.options.bounds ? 0 : (y1 - y0) * 0.06;
    return { x0, x1: x1 === x0 ? x0 + 1 : x1, y0: y0 === 0 ? 0 : y0 - margin, y1: y1 + margin };
  }

  draw() {
    const [wide, high] = [this.canvas.clientWidth, this.canvas.clientHeight];
    if (!this.isVisible || !wide) return;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = wide * ratio;
    this.canvas.height = high * ratio;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    if (!this.lines.length) return;
    const span = this.extent();
    this.x = (step) => MARGIN.left + ((step - span.x0) / (span.x1 - span.x0)) * (wide - MARGIN.left - MARGIN.right);
    this.y = (value) => high - MARGIN.bottom - ((value - span.y0) / (span.y1 - span.y0)) * (high - MARGIN.top - MARGIN.bottom);
    this.axes(pen, span, wide, high);
    if (this.options.stacked) this.stack(pen);
    else this.curves(pen);
    if (hovered !== null) this.cross(pen, high);
  }

  axes(pen, span, wide, high) {
    pen.font = `11px ${colour("--sans")}`;
    pen.lineWidth = 1;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (const value of ticks(span.y0, span.y1, high / 50)) {
      const y = Math.round(this.y(value)) + 0.5;
      pen.strokeStyle = colour("--grid");
      pen.beginPath();
      pen.moveTo(MARGIN.left, y);
      pen.lineTo(wide - MARGIN.right, y);
      pen.stroke();
      pen.fillStyle = colour("--quiet");
      pen.fillText(number(value), MARGIN.left - 7, y);
    }
    pen.textBaseline = "alphabetic";
    pen.textAlign = "center";
    for (const step of ticks(span.x0, span.x1, wide / 90)) if (Number.isInteger(step)) pen.fillText(number(step), this.x(step), high - 6);
  }

  curves(pen) {
    pen.lineJoin = "round";
    for (const [index, line] of this.lines.entries()) {
      const faint = this.means[index] !== line.values;
      if (faint) this.stroke(pen, line.steps, line.values, line.colour, 1, 0.28);
      pen.setLineDash(line.dashed ? [5, 4] : []);
      this.stroke(pen, line.steps, this.means[index], line.colour, 2, 1);
      pen.setLineDash([]);
      if (line.steps.length <= 40 && !faint) for (const [i, step] of line.steps.entries()) this.dot(pen, step, line.values[i], line.colour, 2.5);
    }
  }

  stack(pen) {
    for (const line of [...this.lines].reverse()) {
      pen.beginPath();
      line.steps.forEach((step, i) => pen[i ? "lineTo" : "moveTo"](this.x(step), this.y(line.top[i])));
      for (let i = line.steps.length - 1; i >= 0; i--) pen.lineTo(this.x(line.steps[i]), this.y(line.bottom[i]));
      pen.closePath();
      pen.fillStyle = line.colour;
      pen.globalAlpha = 0.75;
      pen.fill();
      pen.globalAlpha = 1;
    }
  }

  stroke(pen, steps, values, ink, width, alpha) {
    pen.strokeStyle = ink;
    pen.lineWidth = width;
    pen.globalAlpha = alpha;
    pen.beginPath();
    steps.forEach((step, i) => pen[i ? "lineTo" : "moveTo"](this.x(step), this.y(values[i])));
    pen.stroke();
    pen.globalAlpha = 1;
  }

  dot(pen, step, value, ink, radius) {
    pen.fillStyle = ink;
    pen.beginPath();
    pen.arc(this.x(step), this.y(value), radius, 0, 7);
    pen.fill();
  }

  cross(pen, high) {
    const x = Math.round(this.x(hovered)) + 0.5;
    if (x < MARGIN.left) return;
    pen.strokeStyle = colour("--quiet");
    pen.lineWidth = 1;
    pen.setLineDash([3, 3]);
    pen.beginPath();
    pen.moveTo(x, MARGIN.top);
    pen.lineTo(x, high - MARGIN.bottom);
    pen.stroke();
    pen.setLineDash([]);
    for (const [index, line] of this.lines.entries()) {
      const at = nearest(line.steps, hovered);
      if (line.steps[at] === hovered) this.dot(pen, hovered, line.top ? line.top[at] : this.means[index][at], line.colour, 3.5);
    }
  }

  hover(event) {
    if (!this.lines.length || !this.x) return;
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    let best = null;
    for (const line of this.lines) {
      for (const step of line.steps) if (best === null || Math.abs(this.x(step) - x) < Math.abs(this.x(best) - x)) best = step;
    }
    setHovered(best, this);
    this.showTip(best, x, box.width);
  }

  showTip(step, x, wide) {
    const rows = [];
    for (const [index, line] of this.lines.entries()) {
      const at = nearest(line.steps, step);
      if (line.steps[at] !== step) continue;
      const mean = this.means[index] === line.values ? "" : ` (${this.options.format(this.means[index][at])})`;
      rows.push(h("div", {}, h("i", { style: { background: line.colour } }), h("span", {}, line.name), h("b", {}, this.options.format(line.values[at]), h("small", {}, mean))));
    }
    fill(this.tip, h("header", {}, `step ${step.toLocaleString("en")}`), this.options.stacked ? rows.reverse() : rows);
    this.tip.hidden = false;
    const right = x > wide / 2;
    this.tip.style.left = right ? "auto" : `${x + 14}px`;
    this.tip.style.right = right ? `${wide - x + 14}px` : "auto";
  }
}

function nearest(steps, step) {
  let [low, high] = [0, steps.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

function setHovered(step, source = null) {
  if (step === hovered && source) return;
  hovered = step;
  for (const chart of charts) {
    if (chart !== source) chart.tip.hidden = true;
    if (chart.isVisible) chart.draw();
  }
}

export function redrawAll() {
  for (const chart of charts) chart.draw();
}
