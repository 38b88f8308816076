// Elements and numbers. Text goes into text nodes only: nothing from a run becomes markup.

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

/** The text with visible control characters and direction marks. */
export function visible(text) {
  return String(text ?? "").replace(CONTROL, (sign) => {
    const code = sign.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return code === 0x7f ? "\u2421" : `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
  });
}

/** The names, shortened so that a cut at the end leaves them different: what a long name shares with others is left out. */
export function shortNames(names) {
  const shared = (a, b) => {
    let length = 0;
    while (length < a.length && a[length] === b[length]) length++;
    return length;
  };
  return names.map((name, index) => {
    const common = Math.max(0, ...names.map((other, at) => (at === index || other === name ? 0 : shared(name, other))));
    return name.length > 20 && common > 12 ? `${name.slice(0, 4)}…${name.slice(Math.min(common, name.length - 6) - 4)}` : name;
  });
}

/** Makes an element: h("button", {class: "quiet", onclick}, "text", child). Children are nodes or text. */
export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || (value === false && !name.startsWith("aria-"))) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "dataset") Object.assign(node.dataset, value);
    else if (name === "value") node.value = value;
    else if (name === "title") node.title = visible(value);
    else node.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : value);
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : visible(child));
  }
}

export function fill(node, ...children) {
  node.replaceChildren();
  append(node, children);
  return node;
}

/** A number in few characters; a dash for null. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return visible(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(Math.max(0, digits - 2)).replace("-", "\u2212");
  const text = Number.isInteger(value) ? value.toLocaleString("en") : trimZeros(value.toPrecision(Math.max(digits, integerDigits(size))));
  return text.replace("-", "\u2212");
}

const integerDigits = (size) => (size >= 1 ? Math.floor(Math.log10(size)) + 1 : 1);
const trimZeros = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 120 ? `${value.toFixed(1)} s` : `${(value / 60).toFixed(1)} min`;
}

export const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

/** Delays the call until no other came for `wait` ms. */
export function debounced(call, wait = 200) {
  let timer;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...args), wait);
  };
}
