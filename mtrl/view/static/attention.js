// The attention of a token on each patch, drawn over the images as the model saw them.

import * as api from "mtrl/api";
import { h, number } from "mtrl/dom";

const VEIL = "12 14 18"; // drawn over patches with little attention
const DARKEST = 0.75;
const loaded = new WeakMap(); // response -> its maps
const loading = new WeakMap(); // response -> the promise of its maps

/** The maps of a response if they are loaded; otherwise requests them and calls `then` when they arrive. */
export function getMaps(run, one, then) {
  if (!one.grids) return null;
  if (loaded.has(one)) return loaded.get(one);
  if (!loading.has(one)) loading.set(one, api.maps(run, one.step, one.row).then((maps) => loaded.set(one, maps)));
  loading.get(one).then(() => then?.(), () => {});
  return null;
}

/** For each image the shares [time][row * width + column] of a token's attention. */
function attentionShares(one, maps, token) {
  const size = maps.levels.length / maps.scale.length;
  let offset = token * size;
  return one.grids.map(([times, rows, columns, shown]) => {
    const frames = Array.from({ length: times }, () => {
      const levels = maps.levels.subarray(offset, (offset += rows * columns));
      return Array.from(levels, (level) => maps.scale[token] * (level / 255) ** 2);
    });
    return { rows, columns, shown, frames, sum: frames.flat().reduce((a, b) => a + b, 0) };
  });
}

/** Draws a token's attention over its `.attended` pictures: less attention is darker. */
export function drawAttention(pictures, one, maps, token) {
  const images = attentionShares(one, maps, token);
  const most = Math.max(...images.flatMap((image) => image.frames.flat()), 1e-12);
  images.forEach((image, index) => {
    const { rows, columns, shown, frames, sum } = image;
    if (!pictures[index] || !rows || !columns) return;
    const canvas = pictures[index].querySelector("canvas") ?? pictures[index].appendChild(h("canvas", { class: "attention-map", "aria-hidden": true }));
    canvas.width = columns * shown.length;
    canvas.height = rows;
    const pen = canvas.getContext("2d");
    shown.forEach((time, frame) => frames[time].forEach((share, cell) => {
      pen.fillStyle = `rgb(${VEIL} / ${(DARKEST * (1 - share / most)).toFixed(3)})`;
      pen.fillRect(frame * columns + (cell % columns), Math.floor(cell / columns), 1, 1);
    }));
    canvas.hidden = false;
    const caption = pictures[index].nextElementSibling;
    if (caption) {
      caption.dataset.original ??= caption.textContent;
      caption.textContent = `${number(100 * sum, 2)}% of its attention`;
    }
  });
}

export function clearAttention(pictures) {
  for (const picture of pictures) {
    const canvas = picture.querySelector("canvas");
    if (canvas) canvas.hidden = true;
    const caption = picture.nextElementSibling;
    if (caption?.dataset.original) caption.textContent = caption.dataset.original;
  }
}
