// Where a token looks: its attention on each patch, over the images as the model saw them.

import * as api from "mtrl/api";
import { h, number } from "mtrl/dom";

const VEIL = "12 14 18"; // over what the token passes by; colours stay what they are
const DARKEST = 0.75;
const known = new WeakMap(); // a response -> its maps
const coming = new WeakMap(); // a response -> the promise of them

/** The maps of a response, where they are here; else they are asked for, and `then` is called once they have come. */
export function mapsOf(run, one, then) {
  if (!one.grids) return null;
  if (known.has(one)) return known.get(one);
  if (!coming.has(one)) coming.set(one, api.maps(run, one.step, one.row).then((found) => known.set(one, found)));
  coming.get(one).then(() => then?.(), () => {});
  return null;
}

/** For each image the shares [time][row * width + column] of a token's attention. */
function sharesOf(one, maps, place) {
  const size = maps.levels.length / maps.scale.length;
  let at = place * size;
  return one.grids.map(([times, rows, columns, shown]) => {
    const frames = Array.from({ length: times }, () => {
      const levels = maps.levels.subarray(at, (at += rows * columns));
      return Array.from(levels, (level) => maps.scale[place] * (level / 255) ** 2);
    });
    return { rows, columns, shown, frames, sum: frames.flat().reduce((a, b) => a + b, 0) };
  });
}

/** Draws a token's attention over pictures, one `.seen` an image: the less of it, the darker. */
export function look(pictures, one, maps, place) {
  const images = sharesOf(one, maps, place);
  const most = Math.max(...images.flatMap((image) => image.frames.flat()), 1e-12);
  images.forEach((image, which) => {
    const { rows, columns, shown, frames, sum } = image;
    if (!pictures[which] || !rows || !columns) return;
    const canvas = pictures[which].querySelector("canvas") ?? pictures[which].appendChild(h("canvas", { class: "looks", "aria-hidden": true }));
    canvas.width = columns * shown.length;
    canvas.height = rows;
    const pen = canvas.getContext("2d");
    shown.forEach((time, frame) => frames[time].forEach((share, cell) => {
      pen.fillStyle = `rgb(${VEIL} / ${(DARKEST * (1 - share / most)).toFixed(3)})`;
      pen.fillRect(frame * columns + (cell % columns), Math.floor(cell / columns), 1, 1);
    }));
    canvas.hidden = false;
    const caption = pictures[which].nextElementSibling;
    if (caption) {
      caption.dataset.usual ??= caption.textContent;
      caption.textContent = `${number(100 * sum, 2)}% of its attention`;
    }
  });
}

export function lookAway(pictures) {
  for (const picture of pictures) {
    const canvas = picture.querySelector("canvas");
    if (canvas) canvas.hidden = true;
    const caption = picture.nextElementSibling;
    if (caption?.dataset.usual) caption.textContent = caption.dataset.usual;
  }
}
