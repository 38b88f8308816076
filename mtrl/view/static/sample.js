// One response, or all responses to its prompt: images, prompt, reward, and every token with its numbers.

import * as api from "mtrl/api";
import { fill, h, number, plural, seconds, visible } from "mtrl/dom";
import { clearAttention, drawAttention, getMaps } from "mtrl/attention";
import { HEATS, allHeats, extraHeats, heatValues, listHeats, makeLegend, makeScale, paint } from "mtrl/heat";
import { verdict } from "mtrl/rollouts";
import { colour, hidden, live, meaning, runColours, set, state } from "mtrl/state";

const NUMBERS = [
  ["dependency", "S"], ["entropy", "entropy"], ["weight", "weight"], ["mask", "kept"], ["trained", "trained on"], ["advantage", "advantage"], ["group_advantage", "before weights"],
  ["old", "log-prob"], ["behaviour", "log-prob when sampled"],
];
const YES_OR_NO = new Set(["mask", "trained"]);
const UNREADABLE = "unreadable call"; // in place of the name of its tool
const SMALL = 200; // pixels: smaller images are enlarged
const ENLARGED = 190;

function enlarge(img) {
  const [width, height] = [img.naturalWidth, img.naturalHeight];
  if (width > SMALL) return;
  const factor = ENLARGED / Math.max(width, height, 1);
  Object.assign(img.style, { width: `${width * factor}px`, height: `${height * factor}px`, imageRendering: "pixelated" });
}

/** Tokens or bars, with what `draw` makes of each message of an environment at its place. */
function interleave(nodes, messages, draw) {
  const begins = [0, ...messages.map((message) => message.after)];
  return begins.map((begin, index) => [index ? draw(messages[index - 1]) : null, nodes.slice(begin, begins[index + 1])]);
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
    this.requested = key;
    try {
      const one = await api.response(run, step, row);
      if (this.requested !== key) return;
      this.shown = { run, one, group: null };
      this.draw();
    } catch (error) {
      if (this.requested === key) this.nothing(`This response cannot be shown: ${error.message}`);
    }
  }

  async draw() {
    this.clearToken();
    if (!this.shown) return;
    const { run, one } = this.shown;
    getMaps(run, one); // load them before a token is pointed at
    if (state.view === "group" && !this.shown.group) {
      const shown = this.shown;
      try {
        shown.group = await api.group(run, one.step, one.row);
        shown.others = await this.otherRuns(run, one);
      } catch {
        shown.group ??= [one];
      }
      if (this.shown !== shown) return;
    }
    const members = state.view === "group" ? this.shown.group : [one];
    const heat = this.heat(members);
    const scale = heat ? makeScale(heat, members, state.segment) : null;
    const body = state.view === "group" ? this.groups(members, scale) : this.sampleBody(one, scale);
    fill(this.node, this.head(one), h("div", { class: "prompt" }, this.images(run, one), this.question(one)), this.heatBar(members, heat, scale), body);
  }

  /** The chosen heat map, or the first that these responses have. */
  heat(members) {
    const has = (heat) => members.some((each) => heatValues(heat, each, state.segment));
    const heats = listHeats(members).filter(has);
    return heats.find((heat) => heat.key === state.heat) ?? heats[0] ?? null;
  }

  head(one) {
    const view = (name, label) => h("button", { class: "pill", "aria-pressed": state.view === name, onclick: () => set({ view: name }) }, label);
    const index = one.members.indexOf(one.row) + 1;
    return h("header", {}, h("button", { class: "icon", title: "previous (← or k)", "aria-label": "previous", onclick: () => this.move(-1) }, "‹"), h("button", { class: "icon", title: "next (→ or j)", "aria-label": "next", onclick: () => this.move(1) }, "›"),
      h("h2", {}, `Step ${one.step}`, h("span", { class: "quiet" }, ` · ${visible(one.id)} · response ${index} of ${one.members.length}`)), h("span", { class: "grow" }), h("div", { class: "pills" }, view("sample", "Response"), view("group", `Group of ${one.members.length}`)));
  }

  images(run, one) {
    const figure = (key, caption, index, count, isAttended) => {
      const img = h("img", { src: api.image(run, one.step, key), alt: caption, onload: () => enlarge(img) });
      return h("figure", {}, h("div", { class: isAttended ? "attended" : "" }, img), h("figcaption", {}, count > 1 ? `${caption} ${index + 1}` : caption));
    };
    const figures = (keys, caption, isAttended) => (keys ?? []).map((key, index) => [index, figure(key, caption, index, keys.length, isAttended)]);
    const pairs = [...figures(one.prompt.images, "as the model saw it", true), ...figures(one.prompt.perturbed, "perturbed view")].sort(([a], [b]) => a - b);
    return pairs.length ? h("div", { class: "images" }, pairs.map(([, node]) => node)) : null;
  }

  question(one) {
    const text = (one.prompt.text ?? "").trim();
    const answer = one.prompt.answer;
    return h("div", { class: "question" }, h("h3", {}, "Prompt"), text ? h("pre", {}, text) : h("p", { class: "quiet" }, "not in this file"), answer === null || answer === undefined ? null : h("p", { class: "answer" }, h("span", { class: "quiet" }, "answer "), h("b", {}, answer)));
  }

  heatBar(members, heat, scale) {
    if (!heat) return h("p", { class: "quiet heat-bar" }, "This file has no numbers for single tokens.");
    const buttons = listHeats(members).map((each, index) => {
      const exists = members.some((one) => heatValues(each, one, state.segment));
      const help = exists ? `${each.help}${index < HEATS.length ? ` (${index + 1})` : ""}` : `not recorded${each.needs ? `; requires ${each.needs}` : ""}`;
      return h("button", { class: "pill", title: help, disabled: !exists, "aria-pressed": each.key === heat.key, dataset: { heat: each.key }, onclick: () => set({ heat: each.key }) }, each.label);
    });
    const segments = heat.key === "vision" ? h("select", { "aria-label": "layers", onchange: (event) => set({ segment: event.target.value }) }, members[0].segments.map((name) => h("option", { value: name, selected: name === state.segment }, `${name} layers`))) : null;
    return h("div", { class: "heat-bar" }, h("div", { class: "pills" }, buttons), segments, h("span", { class: "grow" }), this.legend(scale));
  }

  legend(scale) {
    const { text, stops } = makeLegend(scale);
    if (!stops) return h("div", { class: "legend" }, h("span", { class: "token off" }, text[0]), h("span", { class: "token on" }, text[1]));
    return h("div", { class: "legend" }, text[0], h("i", { style: { background: `linear-gradient(to right, ${stops.join(", ")})` } }), text[1]);
  }

  sampleBody(one, scale) {
    return h("div", { class: "body" }, h("div", { class: "reading" }, h("div", { class: "card" }, this.response(one, scale), this.strip(one, scale)), this.matrix(one)), h("div", { class: "facts" }, this.reward(one), this.numbers(one), this.attention(one)));
  }

  /** The responses of the other runs to the same prompt at the same step. */
  async otherRuns(run, one) {
    const others = [...live.runs.keys()].filter((index) => index !== run && !hidden.has(index) && live.runs[index].steps.includes(one.step));
    const requests = others.map(async (index) => [index, await api.sameGroup(index, one.step, one.id).catch(() => [])]);
    const groups = (await Promise.all(requests)).filter(([, members]) => members.length);
    for (const [index, members] of groups) for (const each of members) each.run = index;
    return groups;
  }

  groups(members, scale) {
    const others = this.shown.others ?? [];
    if (!others.length) return this.groupBody(this.shown.run, members, scale);
    const all = [[this.shown.run, members], ...others];
    const common = scale ? makeScale(scale.heat, all.flatMap(([, each]) => each), state.segment) : null;
    const title = (run) => h("h2", {}, h("i", { class: "dot", style: { background: `var(${runColours[run % runColours.length]})` } }), ` ${visible(live.runs[run].name)}`);
    return h("div", { class: "side-by-side" }, all.map(([run, each]) => h("section", {}, title(run), this.groupBody(run, each, common))));
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
    return h("div", { class: "members" }, h("p", { class: "quiet" }, `${plural(members.length, "response")}, mean reward ${number(mean)}; highest first, one scale for all`), cards);
  }

  /** The response, each token on the colour of its value. */
  response(one, scale) {
    if (!one.pieces) return h("pre", { class: "response plain" }, one.text);
    const values = scale ? heatValues(scale.heat, one, state.segment) : null;
    const tokens = one.pieces.map((piece, token) => {
      const value = values?.[token];
      const chosen = scale?.heat.kind === "choice" ? (value ? "on" : "off") : "";
      const span = h("span", { class: `token ${chosen}`, tabindex: token ? -1 : 0, dataset: { token }, style: { background: scale ? paint(scale, value) : "" } }, piece.replace(/\n/g, "↵\n"));
      for (const kind of ["pointerenter", "focus"]) span.addEventListener(kind, () => this.showTip(one, token, span));
      return span;
    });
    const box = h("div", { class: "response" }, interleave(tokens, one.messages ?? [], (message) => this.message(one, message)));
    for (const kind of ["pointerleave", "focusout"]) box.addEventListener(kind, () => this.clearToken());
    box.addEventListener("keydown", (event) => stepThrough(event, tokens));
    return box;
  }

  /** What an environment said: the tools that were called, its text and its images. */
  message(one, { tools, errors, tokens, seconds: waited, content, images }) {
    const names = tools.map((name) => h("code", { class: name ? "" : "wrong" }, name || UNREADABLE));
    const facts = [plural(tokens, "token"), seconds(waited)].join(" · ");
    const run = one.run ?? this.shown?.run;
    const thumbnail = (key) => {
      const img = h("img", { src: api.image(run, one.step, key), alt: "image of the message", onload: () => img.classList.toggle("small", img.naturalWidth <= SMALL) });
      return img;
    };
    const head = h("header", {}, "environment", names, h("span", { class: "grow" }), errors ? h("span", { class: "wrong" }, `${errors} failed`) : null, h("span", { class: "quiet" }, facts));
    const node = h("section", { class: "message", "aria-label": "message of the environment" }, head, content.trim() ? h("pre", {}, content.trim()) : null, images.length ? h("div", { class: "shown" }, images.map(thumbnail)) : null);
    node.addEventListener("pointerenter", () => this.clearToken());
    return node;
  }

  /** Hides the tip and the attention of the token that was pointed at. */
  clearToken() {
    this.tip.hidden = true;
    this.attending = null;
    clearAttention(this.node.querySelectorAll(".attended"));
  }

  /** Draws the attention of a token on the images, and in the tip if those are scrolled out of sight. */
  showAttention(one, token) {
    const run = one.run ?? this.shown?.run;
    const key = `${one.step} ${one.row} ${token}`;
    this.attending = key;
    const maps = getMaps(run, one, () => key === this.attending && this.showAttention(one, token));
    const pictures = [...this.node.querySelectorAll(".attended")];
    if (!maps) return clearAttention(pictures);
    drawAttention(pictures, one, maps, token);
    const top = this.node.getBoundingClientRect().top;
    if (pictures.some((picture) => picture.getBoundingClientRect().top + 40 < top)) {
      const copies = pictures.map((picture) => h("div", { class: "attended" }, h("img", { src: picture.querySelector("img").src, alt: "" })));
      this.tip.append(h("div", { class: "thumbs" }, copies));
      drawAttention(copies, one, maps, token);
    }
  }

  showTip(one, token, span) {
    const streams = one.streams;
    const rows = NUMBERS.filter(([key]) => streams[key]).map(([key, name]) => [name, YES_OR_NO.has(key) ? (streams[key][token] ? "yes" : "no") : number(streams[key][token]), state.heat === key]);
    for (const heat of extraHeats([one])) rows.push([heat.label, number(streams[heat.key][token]), state.heat === heat.key]);
    for (const segment of one.segments) if (streams[`vision_${segment}`]) rows.push([`vision mass, ${segment}`, number(streams[`vision_${segment}`][token]), state.heat === "vision" && segment === state.segment]);
    const name = one.pieces[token] === "" ? "(part of the next character)" : JSON.stringify(one.pieces[token]);
    fill(this.tip, h("header", {}, h("code", {}, name), h("span", { class: "quiet" }, `token ${token + 1} of ${one.pieces.length}, id ${streams.ids?.[token] ?? "–"}`)), h("dl", {}, rows.map(([label, value, strong]) => [h("dt", { class: strong ? "strong" : "" }, label), h("dd", { class: strong ? "strong" : "" }, value)])));
    this.showAttention(one, token);
    this.tip.hidden = false;
    const [box, own] = [span.getBoundingClientRect(), this.tip.getBoundingClientRect()];
    const below = box.bottom + own.height + 10 < innerHeight;
    this.tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - own.width - 8))}px`;
    this.tip.style.top = `${below ? box.bottom + 6 : Math.max(8, box.top - own.height - 6)}px`;
    this.node.querySelectorAll(".bar.under").forEach((bar) => bar.classList.remove("under"));
    this.node.querySelector(`.bar[data-token="${token}"]`)?.classList.add("under");
  }

  /** The same values as bars: an overview of a long response. */
  strip(one, scale) {
    if (!scale || !one.pieces || one.pieces.length < 2) return null;
    const values = heatValues(scale.heat, one, state.segment);
    const sign = scale.heat.sign ?? 1;
    const around = scale.heat.kind === "around";
    const most = Math.max(...values.map((value) => Math.abs((value ?? 0) * sign - (around ? scale.heat.centre : 0))), 1e-9);
    const bars = values.map((value, token) => {
      const size = ((value ?? 0) * sign - (around ? scale.heat.centre : 0)) / most;
      const ink = around && size < 0 ? "--heat-minus" : around ? "--heat-plus" : "--heat";
      const bar = h("span", { class: "bar", dataset: { token }, title: `${visible(one.pieces[token])}  ${number(value)}` }, h("i", { style: { height: `${Math.max(1.5, Math.abs(size) * 100)}%`, background: `rgb(${colour(ink)})` } }));
      bar.addEventListener("pointerenter", () => this.highlight(token, true));
      bar.addEventListener("pointerleave", () => this.highlight(token, false));
      return bar;
    });
    return h("div", { class: "strip", "aria-hidden": true }, interleave(bars, one.messages ?? [], () => h("i", { class: "between", title: "a message of the environment" })));
  }

  /** All heat maps, one row each, one column per token. */
  matrix(one) {
    if (!one.pieces) return null;
    const rows = allHeats(one);
    const count = one.pieces.length;
    const line = ({ heat, segment, values, scale, label }) => {
      const canvas = h("canvas", { width: count, height: 1, "aria-hidden": true });
      const pen = canvas.getContext("2d");
      values.forEach((value, token) => {
        pen.fillStyle = heat.kind === "choice" ? (value ? `rgb(${colour("--heat-plus")} / 0.8)` : "transparent") : paint(scale, value) || "transparent";
        pen.fillRect(token, 0, 1, 1);
      });
      const tokenAt = (event) => Math.min(count - 1, Math.max(0, Math.floor((event.offsetX / canvas.clientWidth) * count)));
      canvas.addEventListener("pointermove", (event) => this.pointAt(one, tokenAt(event), event));
      canvas.addEventListener("pointerleave", () => this.pointAt(one, null));
      const choose = () => set(segment ? { heat: heat.key, segment } : { heat: heat.key });
      return h("div", { class: "row" }, h("button", { class: "quiet", title: heat.help, onclick: choose }, label), canvas);
    };
    return h("div", { class: "card matrix" }, h("h3", {}, "Token by token"), rows.map(line));
  }

  pointAt(one, token, event) {
    this.node.querySelectorAll(".token.pointed").forEach((span) => span.classList.remove("pointed"));
    if (token === null) return this.clearToken();
    this.highlight(token, true);
    this.showTip(one, token, { getBoundingClientRect: () => ({ left: event.clientX + 12, top: event.clientY, bottom: event.clientY + 12 }) });
  }

  highlight(token, on) {
    this.node.querySelector(`.token[data-token="${token}"]`)?.classList.toggle("pointed", on);
  }

  reward(one) {
    const parts = Object.entries(one.parts);
    const most = Math.max(1, ...parts.map(([, value]) => Math.abs(value ?? 0)));
    const line = ([name, value]) => [h("dt", { title: meaning(`reward/${name}`) }, name), h("dd", {}, h("span", { class: "meter" }, h("i", { class: value < 0 ? "minus" : "", style: { width: `${(Math.abs(value ?? 0) / most) * 100}%` } })), h("b", {}, number(value)))];
    return h("section", { class: "card" }, h("h3", {}, "Reward"), h("p", { class: `total ${verdict(one)}` }, number(one.reward), one.failed ? h("small", {}, " the reward function failed") : null), parts.length ? h("dl", { class: "parts" }, parts.map(line)) : null);
  }

  numbers(one) {
    const messages = one.messages ?? [];
    const sum = (of) => (messages.length ? messages.reduce((total, message) => total + of(message), 0) : null);
    const rows = [
      ["tokens", one.tokens === null ? null : `${number(one.tokens)}${one.finish === "length" ? ", cut off" : ""}`], ["trained on", one.trained === undefined ? null : plural(one.trained, "token")],
      ["tool calls", sum((message) => message.tools.length)], ["failed calls", sum((message) => message.errors) || null], ["tokens shown", sum((message) => message.tokens)],
      ["advantage", one.advantage], ["trajectory weight", one.scale], ["mean S", one.dependency], ["mean entropy", one.entropy], ["mean vision mass", one.vision], ["weight version", one.version], ["sampled on", one.noised ? "noised image" : null],
    ].filter(([, value]) => value !== null && value !== undefined);
    return rows.length ? h("section", { class: "card" }, h("h3", {}, "Numbers"), h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, number(value))]))) : null;
  }

  /** Attention on the text and image tokens of the prompt, by layer segment. */
  attention(one) {
    if (!one.mass.length) return null;
    const line = (name, [text, vision]) => {
      const share = (value) => ({ width: `${Math.min(1, value ?? 0) * 100}%` });
      return [h("dt", {}, name), h("dd", {}, h("span", { class: "meter two", title: `text ${number(text)}, image ${number(vision)}` }, h("i", { class: "vision", style: share(vision) }), h("i", { class: "text", style: share(text) })), h("b", {}, number(vision, 2)))];
    };
    const pools = one.prompt.pools;
    return h("section", { class: "card" }, h("h3", {}, "Attention by layers"), h("dl", { class: "parts" }, one.segments.map((name, index) => line(name, one.mass[index]))), h("p", { class: "key quiet" }, h("i", { class: "vision" }), "image", h("i", { class: "text" }), "text", pools ? ` · ${pools[1]} and ${pools[0]} tokens` : ""));
  }
}

/** Arrow keys move between tokens once one has the focus; Escape removes the focus. */
function stepThrough(event, tokens) {
  const from = tokens.indexOf(event.target);
  const to = { ArrowRight: from + 1, ArrowLeft: from - 1, Home: 0, End: tokens.length - 1 }[event.key];
  if (from < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") event.target.blur();
  else if (to === undefined) return;
  else tokens[Math.max(0, Math.min(tokens.length - 1, to))].focus();
  event.preventDefault();
  event.stopPropagation();
}
