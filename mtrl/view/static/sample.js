// One response, or all responses to its prompt: images, question, reward, and every token with its numbers.

import * as api from "mtrl/api";
import { fill, h, number, plural, visible } from "mtrl/dom";
import { HEATS, allOf, heatOf, legendOf, paint, scaleOf, valuesOf } from "mtrl/heat";
import { look, lookAway, mapsOf } from "mtrl/looks";
import { verdict } from "mtrl/rollouts";
import { colour, hidden, live, runColours, set, state } from "mtrl/state";

const NUMBERS = [
  ["dependency", "S"], ["entropy", "entropy"], ["weight", "weight"], ["mask", "trained on"], ["advantage", "advantage"], ["group_advantage", "before weights"],
  ["old", "log-prob"], ["perturbed", "log-prob, perturbed image"], ["reference", "log-prob, reference"], ["behaviour", "log-prob when sampled"], ["values", "value"],
];
const SMALL = 200; // pixels: a smaller image is shown larger, its pixels sharp
const ENLARGED = 190;

function enlarge(img) {
  const [width, height] = [img.naturalWidth, img.naturalHeight];
  if (width > SMALL) return;
  const factor = ENLARGED / Math.max(width, height, 1);
  Object.assign(img.style, { width: `${width * factor}px`, height: `${height * factor}px`, imageRendering: "pixelated" });
}

export class Sample {
  constructor(move) {
    this.move = move;
    this.node = h("article", { class: "sample" });
    this.tip = h("div", { class: "token-tip", hidden: true });
    document.body.append(this.tip);
    this.shown = null;
  }

  nothing(text) {
    this.shown = null;
    fill(this.node, h("p", { class: "empty" }, text));
  }

  async load(run, step, row) {
    const key = `${run} ${step} ${row}`;
    this.wanted = key;
    try {
      const one = await api.response(run, step, row);
      if (this.wanted !== key) return;
      this.shown = { run, one, group: null };
      this.draw();
    } catch (error) {
      if (this.wanted === key) this.nothing(`This response cannot be shown: ${error.message}`);
    }
  }

  async draw() {
    this.forget();
    if (!this.shown) return;
    const { run, one } = this.shown;
    mapsOf(run, one); // so that they are here when a token is pointed at
    if (state.view === "group" && !this.shown.group) {
      const here = this.shown;
      try {
        here.group = await api.group(run, one.step, one.row);
        here.others = await this.elsewhere(run, one);
      } catch {
        here.group ??= [one];
      }
      if (this.shown !== here) return;
    }
    const members = state.view === "group" ? this.shown.group : [one];
    const heat = this.heat(members);
    const scale = heat ? scaleOf(heat, members, state.segment) : null;
    const body = state.view === "group" ? this.groups(members, scale) : this.sampleBody(one, scale);
    fill(this.node, this.head(one), h("div", { class: "asked" }, this.images(run, one), this.question(one)), this.heatBar(members, heat, scale), body);
  }

  /** The heat map that is chosen, or the first that these responses have. */
  heat(members) {
    const has = (heat) => members.some((each) => valuesOf(heat, each, state.segment));
    return [heatOf(state.heat), ...HEATS].find(has) ?? null;
  }

  head(one) {
    const view = (name, label) => h("button", { class: "pill", "aria-pressed": state.view === name, onclick: () => set({ view: name }) }, label);
    const place = one.members.indexOf(one.row) + 1;
    return h("header", {}, h("button", { class: "icon", title: "previous (← or k)", "aria-label": "previous", onclick: () => this.move(-1) }, "‹"), h("button", { class: "icon", title: "next (→ or j)", "aria-label": "next", onclick: () => this.move(1) }, "›"),
      h("h2", {}, `Step ${one.step}`, h("span", { class: "quiet" }, ` · ${visible(one.id)} · response ${place} of ${one.members.length}`)), h("span", { class: "grow" }), h("div", { class: "pills" }, view("sample", "Response"), view("group", `Group of ${one.members.length}`)));
  }

  images(run, one) {
    const figure = (key, caption, place, many, seen) => {
      const img = h("img", { src: api.image(run, one.step, key), alt: caption, onload: () => enlarge(img) });
      return h("figure", {}, h("div", { class: seen ? "seen" : "" }, img), h("figcaption", {}, many > 1 ? `${caption} ${place + 1}` : caption));
    };
    const of = (keys, caption, seen) => (keys ?? []).map((key, place) => [place, figure(key, caption, place, keys.length, seen)]);
    const pairs = [...of(one.prompt.images, "as the model saw it", true), ...of(one.prompt.perturbed, "perturbed view")].sort(([a], [b]) => a - b);
    return pairs.length ? h("div", { class: "images" }, pairs.map(([, node]) => node)) : null;
  }

  question(one) {
    const text = (one.prompt.text ?? "").trim();
    const answer = one.prompt.answer;
    return h("div", { class: "question" }, h("h3", {}, "Prompt"), text ? h("pre", {}, text) : h("p", { class: "quiet" }, "not in this file"), answer === null || answer === undefined ? null : h("p", { class: "answer" }, h("span", { class: "quiet" }, "answer "), h("b", {}, answer)));
  }

  heatBar(members, heat, scale) {
    if (!heat) return h("p", { class: "quiet heat-bar" }, "This file has no numbers for single tokens.");
    const buttons = HEATS.map((each, place) => {
      const there = members.some((one) => valuesOf(each, one, state.segment));
      const why = there ? `${each.says} (${place + 1})` : `not recorded${each.needs ? `; it takes ${each.needs}` : ""}`;
      return h("button", { class: "pill", title: why, disabled: !there, "aria-pressed": each === heat, dataset: { heat: each.key }, onclick: () => set({ heat: each.key }) }, each.label);
    });
    const segments = heat.key === "vision" ? h("select", { "aria-label": "layers", onchange: (event) => set({ segment: event.target.value }) }, members[0].segments.map((name) => h("option", { value: name, selected: name === state.segment }, `${name} layers`))) : null;
    return h("div", { class: "heat-bar" }, h("div", { class: "pills" }, buttons), segments, h("span", { class: "grow" }), this.legend(scale));
  }

  legend(scale) {
    const { text, stops } = legendOf(scale);
    if (!stops) return h("div", { class: "legend" }, h("span", { class: "token off" }, text[0]), h("span", { class: "token on" }, text[1]));
    return h("div", { class: "legend" }, text[0], h("i", { style: { background: `linear-gradient(to right, ${stops.join(", ")})` } }), text[1]);
  }

  sampleBody(one, scale) {
    return h("div", { class: "body" }, h("div", { class: "reading" }, h("div", { class: "card" }, this.response(one, scale), this.strip(one, scale)), this.matrix(one)), h("div", { class: "facts" }, this.reward(one), this.numbers(one), this.attention(one)));
  }

  /** What the other runs said to the same prompt at the same step. */
  async elsewhere(run, one) {
    const there = live.runs.map((each, place) => [place, each]).filter(([place, each]) => place !== run && !hidden.has(place) && each.steps.includes(one.step));
    const asked = there.map(async ([place]) => [place, await api.sameGroup(place, one.step, one.id).catch(() => [])]);
    const found = (await Promise.all(asked)).filter(([, members]) => members.length);
    for (const [place, members] of found) for (const each of members) each.run = place;
    return found;
  }

  groups(members, scale) {
    const others = this.shown.others ?? [];
    if (!others.length) return this.groupBody(this.shown.run, members, scale);
    const all = [[this.shown.run, members], ...others];
    const common = scale ? scaleOf(scale.heat, all.flatMap(([, each]) => each), state.segment) : null;
    const title = (run) => h("h2", {}, h("i", { class: "dot", style: { background: `var(${runColours[run % runColours.length]})` } }), ` ${visible(live.runs[run].name)}`);
    return h("div", { class: "beside" }, all.map(([run, each]) => h("section", {}, title(run), this.groupBody(run, each, common))));
  }

  groupBody(run, members, scale) {
    const rewards = members.map((one) => one.reward).filter((value) => value !== null);
    const mean = rewards.reduce((a, b) => a + b, 0) / Math.max(1, rewards.length);
    const best = [...members].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
    const cards = best.map((one) => {
      const parts = Object.entries(one.parts).map(([name, value]) => `${name} ${number(value)}`);
      const open = () => set({ run, view: "sample", latest: false, from: `${one.step}`, to: `${one.step}`, page: 0, step: one.step, row: one.row });
      return h("div", { class: `card member ${run === state.run && one.row === state.row ? "chosen" : ""}` }, h("header", {}, h("b", { class: `reward ${verdict(one)}` }, number(one.reward)), h("span", { class: "quiet" }, [...parts, one.tokens != null ? plural(one.tokens, "token") : null, one.advantage != null ? `advantage ${number(one.advantage)}` : null, one.dependency != null ? `S ${number(one.dependency, 2)}` : null].filter(Boolean).join(" · ")), h("span", { class: "grow" }), h("button", { class: "quiet", onclick: open }, "open")), this.response(one, scale));
    });
    return h("div", { class: "members" }, h("p", { class: "quiet" }, `${plural(members.length, "response")}, mean reward ${number(mean)}; the best first, one scale for all`), cards);
  }

  /** The response, each token on the colour of its number. */
  response(one, scale) {
    if (!one.pieces) return h("pre", { class: "response plain" }, one.text);
    const values = scale ? valuesOf(scale.heat, one, state.segment) : null;
    const tokens = one.pieces.map((piece, place) => {
      const value = values?.[place];
      const chosen = scale?.heat.kind === "choice" ? (value ? "on" : "off") : "";
      const span = h("span", { class: `token ${chosen}`, tabindex: place ? -1 : 0, dataset: { place }, style: { background: scale ? paint(scale, value) : "" } }, piece.replace(/\n/g, "↵\n"));
      for (const kind of ["pointerenter", "focus"]) span.addEventListener(kind, () => this.tell(one, place, span));
      return span;
    });
    const box = h("div", { class: "response" }, tokens);
    for (const kind of ["pointerleave", "focusout"]) box.addEventListener(kind, () => this.forget());
    box.addEventListener("keydown", (event) => stepThrough(event, tokens));
    return box;
  }

  /** Nothing is pointed at any more. */
  forget() {
    this.tip.hidden = true;
    this.looking = null;
    lookAway(this.node.querySelectorAll(".seen"));
  }

  /** Where the token looks: on the images, and in the tip where those are scrolled out of sight. */
  lookAt(one, place) {
    const run = one.run ?? this.shown?.run;
    this.looking = `${one.step} ${one.row} ${place}`;
    const here = this.looking;
    const maps = mapsOf(run, one, () => here === this.looking && this.lookAt(one, place));
    const pictures = [...this.node.querySelectorAll(".seen")];
    if (!maps) return lookAway(pictures);
    look(pictures, one, maps, place);
    const top = this.node.getBoundingClientRect().top;
    if (pictures.some((picture) => picture.getBoundingClientRect().top + 40 < top)) {
      const copies = pictures.map((picture) => h("div", { class: "seen" }, h("img", { src: picture.querySelector("img").src, alt: "" })));
      this.tip.append(h("div", { class: "thumbs" }, copies));
      look(copies, one, maps, place);
    }
  }

  tell(one, place, span) {
    const streams = one.streams;
    const rows = NUMBERS.filter(([key]) => streams[key]).map(([key, name]) => [name, key === "mask" ? (streams.mask[place] ? "yes" : "no") : number(streams[key][place]), state.heat === key]);
    for (const segment of one.segments) if (streams[`vision_${segment}`]) rows.push([`vision mass, ${segment}`, number(streams[`vision_${segment}`][place]), state.heat === "vision" && segment === state.segment]);
    const name = one.pieces[place] === "" ? "(part of the next character)" : JSON.stringify(one.pieces[place]);
    fill(this.tip, h("header", {}, h("code", {}, name), h("span", { class: "quiet" }, `token ${place + 1} of ${one.pieces.length}, id ${streams.ids?.[place] ?? "–"}`)), h("dl", {}, rows.map(([label, value, strong]) => [h("dt", { class: strong ? "strong" : "" }, label), h("dd", { class: strong ? "strong" : "" }, value)])));
    this.lookAt(one, place);
    this.tip.hidden = false;
    const [box, own] = [span.getBoundingClientRect(), this.tip.getBoundingClientRect()];
    const below = box.bottom + own.height + 10 < innerHeight;
    this.tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - own.width - 8))}px`;
    this.tip.style.top = `${below ? box.bottom + 6 : Math.max(8, box.top - own.height - 6)}px`;
    this.node.querySelectorAll(".bar.under").forEach((bar) => bar.classList.remove("under"));
    this.node.querySelector(`.bar[data-place="${place}"]`)?.classList.add("under");
  }

  /** The same numbers as bars: where in a long response something happens. */
  strip(one, scale) {
    if (!scale || !one.pieces || one.pieces.length < 2) return null;
    const values = valuesOf(scale.heat, one, state.segment);
    const sign = scale.heat.sign ?? 1;
    const around = scale.heat.kind === "around";
    const most = Math.max(...values.map((value) => Math.abs((value ?? 0) * sign - (around ? scale.heat.centre : 0))), 1e-9);
    const bars = values.map((value, place) => {
      const size = ((value ?? 0) * sign - (around ? scale.heat.centre : 0)) / most;
      const ink = around && size < 0 ? "--heat-minus" : around ? "--heat-plus" : "--heat";
      const bar = h("span", { class: "bar", dataset: { place }, title: `${visible(one.pieces[place])}  ${number(value)}` }, h("i", { style: { height: `${Math.max(1.5, Math.abs(size) * 100)}%`, background: `rgb(${colour(ink)})` } }));
      bar.addEventListener("pointerenter", () => this.point(place, true));
      bar.addEventListener("pointerleave", () => this.point(place, false));
      return bar;
    });
    return h("div", { class: "strip", "aria-hidden": true }, bars);
  }

  /** All heat maps one below the other: a column a token. */
  matrix(one) {
    if (!one.pieces) return null;
    const rows = allOf(one);
    const count = one.pieces.length;
    const line = ({ heat, segment, values, scale, label }) => {
      const canvas = h("canvas", { width: count, height: 1, "aria-hidden": true });
      const pen = canvas.getContext("2d");
      values.forEach((value, place) => {
        pen.fillStyle = heat.kind === "choice" ? (value ? `rgb(${colour("--heat-plus")} / 0.8)` : "transparent") : paint(scale, value) || "transparent";
        pen.fillRect(place, 0, 1, 1);
      });
      const at = (event) => Math.min(count - 1, Math.max(0, Math.floor((event.offsetX / canvas.clientWidth) * count)));
      canvas.addEventListener("pointermove", (event) => this.pointFrom(one, at(event), event));
      canvas.addEventListener("pointerleave", () => this.pointFrom(one, null));
      const choose = () => set(segment ? { heat: heat.key, segment } : { heat: heat.key });
      return h("div", { class: "row" }, h("button", { class: "quiet", title: heat.says, onclick: choose }, label), canvas);
    };
    return h("div", { class: "card matrix" }, h("h3", {}, "Token by token"), rows.map(line));
  }

  pointFrom(one, place, event) {
    this.node.querySelectorAll(".token.pointed").forEach((token) => token.classList.remove("pointed"));
    if (place === null) return this.forget();
    this.point(place, true);
    this.tell(one, place, { getBoundingClientRect: () => ({ left: event.clientX + 12, top: event.clientY, bottom: event.clientY + 12 }) });
  }

  point(place, on) {
    this.node.querySelector(`.token[data-place="${place}"]`)?.classList.toggle("pointed", on);
  }

  reward(one) {
    const parts = Object.entries(one.parts);
    const most = Math.max(1, ...parts.map(([, value]) => Math.abs(value ?? 0)));
    const line = ([name, value]) => [h("dt", {}, name), h("dd", {}, h("span", { class: "meter" }, h("i", { class: value < 0 ? "minus" : "", style: { width: `${(Math.abs(value ?? 0) / most) * 100}%` } })), h("b", {}, number(value)))];
    return h("section", { class: "card" }, h("h3", {}, "Reward"), h("p", { class: `total ${verdict(one)}` }, number(one.reward), one.failed ? h("small", {}, " the reward function failed") : null), parts.length ? h("dl", { class: "parts" }, parts.map(line)) : null);
  }

  numbers(one) {
    const rows = [
      ["tokens", one.tokens === null ? null : `${number(one.tokens)}${one.finish === "length" ? ", cut off" : ""}`], ["trained on", one.kept === undefined ? null : plural(one.kept, "token")],
      ["advantage", one.advantage], ["trajectory weight", one.scale], ["mean S", one.dependency], ["mean entropy", one.entropy], ["mean vision mass", one.vision], ["weights' version", one.version],
    ].filter(([, value]) => value !== null && value !== undefined);
    return rows.length ? h("section", { class: "card" }, h("h3", {}, "Numbers"), h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, number(value))]))) : null;
  }

  /** Where the attention went, by layer segment: text and image tokens of the prompt. */
  attention(one) {
    if (!one.mass.length) return null;
    const line = (name, [text, vision]) => {
      const share = (value) => ({ width: `${Math.min(1, value ?? 0) * 100}%` });
      return [h("dt", {}, name), h("dd", {}, h("span", { class: "meter two", title: `text ${number(text)}, image ${number(vision)}` }, h("i", { class: "vision", style: share(vision) }), h("i", { class: "text", style: share(text) })), h("b", {}, number(vision, 2)))];
    };
    const pools = one.prompt.pools;
    return h("section", { class: "card" }, h("h3", {}, "Attention by layers"), h("dl", { class: "parts" }, one.segments.map((name, place) => line(name, one.mass[place]))), h("p", { class: "key quiet" }, h("i", { class: "vision" }), "image", h("i", { class: "text" }), "text", pools ? ` · ${pools[1]} and ${pools[0]} tokens` : ""));
  }
}

/** Arrows go from token to token once one of them has the focus; Escape gives it back. */
function stepThrough(event, tokens) {
  const at = tokens.indexOf(event.target);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tokens.length - 1 }[event.key];
  if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") event.target.blur();
  else if (to === undefined) return;
  else tokens[Math.max(0, Math.min(tokens.length - 1, to))].focus();
  event.preventDefault();
  event.stopPropagation();
}
