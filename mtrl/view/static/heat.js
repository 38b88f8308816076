// What colours a token: one of its numbers, on a scale that the legend spells out.

import { colour } from "mtrl/state";
import { number } from "mtrl/dom";

export const HEATS = [
  { key: "dependency", label: "S", kind: "amount", root: true, least: 0.1, says: "visual dependency S: how the token's probability changes when the image is perturbed", needs: "a rule or reward that compares two views of the image" },
  { key: "entropy", label: "entropy", kind: "amount", root: true, least: 0.5, says: "entropy of the policy at the token, in nats", needs: "a rule that reads it, such as optimization.enable_entropy_filtering" },
  { key: "vision", label: "vision mass", kind: "amount", least: 0.1, says: "share of the token's attention that goes to the image", needs: "optimization.compute_attention_metrics: true" },
  { key: "weight", label: "weight", kind: "around", centre: 1, says: "what the advantage of the token is multiplied by: trajectory times token weight" },
  { key: "mask", label: "mask", kind: "choice", says: "whether the token's policy gradient counts" },
  { key: "advantage", label: "advantage", kind: "around", centre: 0, says: "what the token is trained with: advantage times its weight" },
  { key: "old", label: "log-prob", kind: "amount", root: true, sign: -1, least: 1, says: "log-probability of the token before the update; the stronger, the more surprising" },
];

export const heatOf = (key) => HEATS.find((heat) => heat.key === key) ?? HEATS[0];

/** The numbers of a response that a heat map shows, or null. */
export function valuesOf(heat, response, segment) {
  const streams = response.streams ?? {};
  if (heat.key === "vision") return streams[`vision_${segment}`] ?? null;
  if (heat.key === "old") return streams.old ?? streams.behaviour ?? null;
  return streams[heat.key] ?? null;
}

/** One scale for some responses, so that their colours compare. */
export function scaleOf(heat, responses, segment) {
  const sign = heat.sign ?? 1;
  const numbers = responses.flatMap((response) => valuesOf(heat, response, segment) ?? []).filter((value) => value !== null);
  if (heat.kind === "choice") return { heat, low: 0, high: 1, share: (value) => value };
  if (heat.kind === "around") {
    const far = Math.max(...numbers.map((value) => Math.abs(value - heat.centre)), 1e-9);
    return { heat, low: heat.centre - far, high: heat.centre + far, share: (value) => (value - heat.centre) / far };
  }
  const high = Math.max(...numbers.map((value) => sign * value), heat.least); // what is small everywhere must not glow
  const share = (value) => Math.max(0, (sign * value) / high);
  return { heat, low: 0, high: sign * high, share: heat.root ? (value) => Math.sqrt(share(value)) : share };
}

/** The background of a token. Amounts grow from nothing to a strong colour; what lies around a centre has two. */
export function paint(scale, value) {
  if (value === null || value === undefined || scale.heat.kind === "choice") return "";
  const share = scale.share(value);
  const name = scale.heat.kind === "around" ? (share < 0 ? "--heat-minus" : "--heat-plus") : "--heat";
  return `rgb(${colour(name)} / ${(Math.min(1, Math.abs(share)) * 0.82).toFixed(3)})`;
}

/** Every heat map that a response has, for a picture of all of them; the attention by its layers. */
export function allOf(response) {
  const rows = [];
  for (const heat of HEATS) {
    const segments = heat.key === "vision" ? response.segments : [""];
    for (const segment of segments) {
      const values = valuesOf(heat, response, segment);
      if (values) rows.push({ heat, segment, values, scale: scaleOf(heat, [response], segment), label: segment ? `vision, ${segment}` : heat.label });
    }
  }
  const layers = rows.filter((row) => row.segment);
  const strongest = layers.reduce((best, row) => (row.scale.high > best.high ? row.scale : best), layers[0]?.scale);
  for (const row of layers) row.scale = strongest; // one scale for all layers, so that they compare
  return rows;
}

export function legendOf(scale) {
  if (scale.heat.kind === "choice") return { text: ["not trained on", "trained on"], stops: null };
  const steps = [0, 0.25, 0.5, 0.75, 1].map((share) => scale.low + share * (scale.high - scale.low));
  return { text: [number(scale.low), number(scale.high)], stops: steps.map((value) => paint(scale, value) || "transparent") };
}
