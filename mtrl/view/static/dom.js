// Elements and numbers. Text is only ever put into text nodes: nothing that a run says becomes markup.

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

/** The text with control characters and marks that turn the direction of writing made visible. */
export function visible(text) {
  return String(text ?? "").replace(CONTROL, (sign) => {
    const code = sign.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return code === 0x7f ? "\u2421" : `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
  });
}

/** h("button", {class: "quiet", onclick}, "text", child): an element. Children are nodes or text. */
export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || (value === false && !name.startsWith("aria-"))) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "dataset") Object.assign(node.dataset, value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : value);
  }
  put(node, children);
  return node;
}

function put(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : visible(child));
  }
}

export function fill(node, ...children) {
  node.replaceChildren();
  put(node, children);
  return node;
}

/** A number in few characters; a dash where there is none. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return visible(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(Math.max(0, digits - 2)).replace("-", "\u2212");
  const text = Number.isInteger(value) ? value.toLocaleString("en") : trimmed(value.toPrecision(Math.max(digits, whole(size))));
  return text.replace("-", "\u2212");
}

const whole = (size) => (size >= 1 ? Math.floor(Math.log10(size)) + 1 : 1);
const trimmed = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 120 ? `${value.toFixed(1)} s` : `${(value / 60).toFixed(1)} min`;
}

export const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

/** Calls the function once things are quiet. */
export function debounced(call, wait = 200) {
  let timer;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...given), wait);
  };
}
