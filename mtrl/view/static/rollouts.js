// The responses of a range of steps, filtered, sorted, one page at a time, and the selected response.

import * as api from "mtrl/api";
import { debounced, fill, h, number, plural } from "mtrl/dom";
import { HEATS } from "mtrl/heat";
import { Sample } from "mtrl/sample";
import { live, set, state } from "mtrl/state";

const SIZE = 50;
const SORTS = [["step", "step"], ["reward", "reward"], ["tokens", "length"], ["dependency", "visual dependency S"], ["entropy", "entropy"], ["vision", "vision mass"], ["advantage", "advantage"]];
const BOUNDS = [["reward", "reward"], ["tokens", "length"], ["dependency", "S"]];
const QUERY = ["run", "from", "to", "latest", "sort", "order", "page", ...BOUNDS.flatMap(([key]) => [`min_${key}`, `max_${key}`])];

export class Rollouts {
  constructor() {
    this.sample = new Sample((change) => this.move(change));
    this.rows = [];
    this.total = 0;
    this.requests = 0;
    this.controls();
    this.list = h("ol", { class: "list", tabindex: 0, "aria-label": "responses" });
    this.pager = h("div", { class: "pager" });
    const side = h("aside", { class: "side" }, this.form, this.list, this.pager);
    this.node = h("section", { class: "rollouts" }, side, this.sample.node);
  }

  controls() {
    const field = (key, label, width = "4.6em") => (this[key] = h("input", { type: "number", step: "any", placeholder: label, "aria-label": label, style: { width }, oninput: debounced(() => this.filter(key)) }));
    this.run = h("select", { "aria-label": "run", onchange: () => set({ run: Number(this.run.value), page: 0, step: null, row: null }) });
    this.latest = h("input", { type: "checkbox", onchange: () => set({ latest: this.latest.checked, page: 0, step: null, row: null }) });
    this.sort = h("select", { "aria-label": "sort by", onchange: () => set({ sort: this.sort.value, page: 0, step: null, row: null }) }, SORTS.map(([key, name]) => h("option", { value: key }, name)));
    this.order = h("button", { class: "icon", title: "reverse the order", "aria-label": "reverse the order", onclick: () => set({ order: state.order ? "" : "desc", page: 0, step: null, row: null }) });
    const bounds = BOUNDS.map(([key, label]) => h("div", { class: "bound" }, h("span", {}, label), field(`min_${key}`, "min"), "–", field(`max_${key}`, "max")));
    this.clear = h("button", { class: "quiet", onclick: () => this.reset() }, "clear");
    this.form = h("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
      this.runLine = h("div", { class: "line" }, h("span", {}, "run"), this.run),
      h("div", { class: "line" }, h("span", {}, "steps"), field("from", "first"), "–", field("to", "last"), h("label", { title: "follow the newest step" }, this.latest, "newest")),
      h("div", { class: "line" }, h("span", {}, "sort"), this.sort, this.order),
      this.more = h("details", {}, h("summary", {}, "filter", this.clear), bounds));
  }

  filter(key) {
    const steps = key === "from" || key === "to" ? { latest: false } : {};
    set({ [key]: this[key].value, page: 0, step: null, row: null, ...steps });
  }

  reset() {
    const empty = Object.fromEntries(BOUNDS.flatMap(([key]) => [[`min_${key}`, ""], [`max_${key}`, ""]]));
    set({ ...empty, page: 0, step: null, row: null });
  }

  about() {
    return live.runs[state.run] ?? live.runs[0];
  }

  refresh() {
    if (!this.about()) return;
    this.showControls();
    this.load();
  }

  changed(keys) {
    this.showControls();
    if (QUERY.some((key) => keys.has(key))) this.load();
    else if (keys.has("step") || keys.has("row")) this.open();
    else this.sample.draw();
  }

  showControls() {
    const run = this.about();
    this.runLine.hidden = live.runs.length < 2;
    if (this.run.children.length !== live.runs.length) fill(this.run, live.runs.map((each, index) => h("option", { value: index }, each.name)));
    this.run.value = state.run;
    this.sort.value = state.sort;
    this.latest.checked = state.latest;
    fill(this.order, state.order ? "↓" : "↑");
    for (const key of ["from", "to", ...BOUNDS.flatMap(([name]) => [`min_${name}`, `max_${name}`])]) if (this[key] !== document.activeElement) this[key].value = state[key];
    if (run && state.latest) [this.from.placeholder, this.to.placeholder] = ["first", `${run.steps.at(-1) ?? "last"}`];
    const filtered = BOUNDS.some(([key]) => state[`min_${key}`] !== "" || state[`max_${key}`] !== "");
    if (filtered) this.more.open = true;
    this.clear.hidden = !filtered;
  }

  query() {
    const newest = this.about()?.steps.at(-1);
    const range = state.latest && newest !== undefined ? { from: newest, to: newest } : { from: state.from, to: state.to };
    const bounds = Object.fromEntries(BOUNDS.flatMap(([key]) => [`min_${key}`, `max_${key}`]).map((key) => [key, state[key]]));
    return { ...range, ...bounds, sort: state.sort, order: state.order, page: state.page, size: SIZE };
  }

  async load() {
    const run = this.about();
    if (!run) return;
    if (!run.steps.length) {
      fill(this.list, h("li", { class: "empty" }, "No responses are recorded yet."));
      this.sample.nothing("Responses appear here after the first step.");
      return;
    }
    const request = ++this.requests;
    const query = this.query();
    const key = JSON.stringify([state.run, query, query.from === "" || query.to === "" ? run.steps.length : 0]);
    if (key === this.listKey) return;
    let page;
    try {
      page = await api.rollouts(state.run, query);
    } catch (error) {
      if (request === this.requests) fill(this.list, h("li", { class: "empty" }, `The responses cannot be shown: ${error.message}`));
      return;
    }
    if (request !== this.requests) return;
    this.listKey = key;
    [this.rows, this.total] = [page.rows, page.total];
    this.showList();
    const isListed = this.rows.some((row) => row.step === state.step && row.row === state.row);
    const first = this.fromEnd ? this.rows.at(-1) : this.rows[0];
    this.fromEnd = false;
    if (!this.rows.length) this.sample.nothing(this.total ? "" : "No response passes the filters.");
    else if (isListed) this.open();
    else if (state.step !== null && !this.hasOpened) this.open(); // from a bookmark: it may be on another page
    else set({ step: first.step, row: first.row });
    this.hasOpened = true;
  }

  showList() {
    const showStep = new Set(this.rows.map((row) => row.step)).size > 1;
    fill(this.list, this.rows.map((row) => this.item(row, showStep)), this.rows.length ? null : h("li", { class: "empty" }, "No matching responses."));
    const first = state.page * SIZE;
    const step = (change) => h("button", { class: "icon", "aria-label": change < 0 ? "previous page" : "next page", disabled: change < 0 ? !state.page : first + SIZE >= this.total, onclick: () => set({ page: state.page + change, step: null, row: null }) }, change < 0 ? "‹" : "›");
    fill(this.pager, step(-1), h("span", {}, this.total ? `${(first + 1).toLocaleString("en")}–${Math.min(first + SIZE, this.total).toLocaleString("en")} of ${plural(this.total, "response")}` : "none"), step(1));
    this.mark();
  }

  item(row, showStep) {
    const picture = row.image ? h("img", { src: api.image(state.run, row.step, row.image), alt: "", loading: "lazy" }) : h("span", { class: "no-image" });
    const facts = [showStep ? `step ${row.step}` : null, row.tokens != null ? plural(row.tokens, "token") : null, row.dependency != null ? `S ${number(row.dependency, 2)}` : null];
    return h("li", { dataset: { key: `${row.step} ${row.row}` }, onclick: () => set({ step: row.step, row: row.row }) },
      picture,
      h("div", { class: "text" }, h("span", { class: "head" }, row.head), h("span", { class: "quiet" }, facts.filter(Boolean).join(" · "))),
      h("b", { class: `reward ${verdict(row)}` }, number(row.reward)));
  }

  mark() {
    for (const item of this.list.children) {
      const chosen = item.dataset.key === `${state.step} ${state.row}`;
      item.setAttribute("aria-selected", chosen);
      if (chosen) item.scrollIntoView({ block: "nearest" });
    }
  }

  open() {
    this.mark();
    if (state.step !== null) this.sample.load(state.run, state.step, state.row);
  }

  /** Moves to the next or previous response of the list, and to the next page at its end. */
  move(change) {
    const index = this.rows.findIndex((row) => row.step === state.step && row.row === state.row) + change;
    if (this.rows[index]) return set({ step: this.rows[index].step, row: this.rows[index].row });
    const page = state.page + Math.sign(change);
    if (page < 0 || page * SIZE >= this.total) return;
    this.fromEnd = change < 0;
    set({ page, step: null, row: null });
  }

  moveStep(change) {
    const steps = this.about()?.steps ?? [];
    const now = state.latest ? steps.at(-1) : Number(state.to || state.step || steps.at(-1));
    const index = Math.max(0, steps.findIndex((step) => step >= now)) + change;
    if (steps[index] === undefined) return;
    set({ latest: false, from: `${steps[index]}`, to: `${steps[index]}`, page: 0, step: null, row: null });
  }

  key(pressed) {
    const heat = HEATS[Number(pressed) - 1];
    if (pressed === "ArrowRight" || pressed === "j") this.move(1);
    else if (pressed === "ArrowLeft" || pressed === "k") this.move(-1);
    else if (pressed === "]") this.moveStep(1);
    else if (pressed === "[") this.moveStep(-1);
    else if (pressed === "g") set({ view: state.view === "group" ? "sample" : "group" });
    else if (heat) set({ heat: heat.key });
    else return false;
    return true;
  }

  repaint() {
    this.sample.draw();
  }
}

/** "right", "wrong" or "" according to the parts of the reward. */
export function verdict(row) {
  const score = ["accuracy", "math", "correctness", "correct", "acc"].map((name) => row.parts?.[name]).find((value) => value !== null && value !== undefined);
  return score === undefined ? "" : score >= 1 ? "right" : "wrong";
}
