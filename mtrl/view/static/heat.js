// Heat maps: a token is coloured by one of its numbers, on the scale in the legend.

import { colour } from "mtrl/state";
import { number } from "mtrl/dom";

export const HEATS = [
  { key: "dependency", label: "S", kind: "amount", root: true, least: 0.1, help: "visual dependency S: how much the token's probability changes when the image is perturbed", needs: "a rule or reward that compares two views of the image" },
  { key: "entropy", label: "entropy", kind: "amount", root: true, least: 0.5, help: "entropy of the policy at the token, in nats", needs: "a rule that reads it, such as optimization.enable_entropy_filtering" },
  { key: "vision", label: "vision mass", kind: "amount", least: 0.1, help: "share of the token's attention on the image", needs: "optimization.compute_attention_metrics: true" },
  { key: "weight", label: "weight", kind: "around", centre: 1, help: "factor of the token's advantage: trajectory weight times token weight" },
  { key: "mask", label: "mask", kind: "choice", help: "whether the filters keep the token; a kept token with an advantage of 0 is not trained on" },
  { key: "advantage", label: "advantage", kind: "around", centre: 0, help: "advantage times weight: the value the token is trained with" },
  { key: "old", label: "log-prob", kind: "amount", root: true, sign: -1, least: 1, help: "log-probability of the token before the update; stronger colour: more surprising" },
];

/** One heat map for each other signal that these responses have, named by the server. */
export function extraHeats(responses) {
  const named = Object.entries(Object.assign({}, ...responses.map((response) => response.signals)));
  return named.map(([key, { label, meaning, centre, sign }]) => ({ key, label, help: meaning, ...(centre === null ? { kind: "amount", sign, least: 0.1 } : { kind: "around", centre }) }));
}

export const listHeats = (responses) => [...HEATS, ...extraHeats(responses)];

/** The numbers of a heat map for a response, or null. */
export function heatValues(heat, response, segment) {
  const streams = response.streams ?? {};
  if (heat.key === "vision") return streams[`vision_${segment}`] ?? null;
  if (heat.key === "old") return streams.old ?? streams.behaviour ?? null;
  return streams[heat.key] ?? null;
}

/** One scale for several responses, so that their colours compare. */
export function makeScale(heat, responses, segment) {
  const sign = heat.sign ?? 1;
  const numbers = responses.flatMap((response) => heatValues(heat, response, segment) ?? []).filter((value) => value !== null);
  if (heat.kind === "choice") return { heat, low: 0, high: 1, share: (value) => value };
  if (heat.kind === "around") {
    const far = Math.max(...numbers.map((value) => Math.abs(value - heat.centre)), 1e-9);
    return { heat, low: heat.centre - far, high: heat.centre + far, share: (value) => (value - heat.centre) / far };
  }
  const high = Math.max(...numbers.map((value) => sign * value), heat.least); // small values everywhere must not look strong
  const share = (value) => Math.max(0, (sign * value) / high);
  return { heat, low: 0, high: sign * high, share: heat.root ? (value) => Math.sqrt(share(value)) : share };
}

/** The background of a token: amounts from transparent to one strong colour, values around a centre in two colours. */
export function paint(scale, value) {
  if (value === null || value === undefined || scale.heat.kind === "choice") return "";
  const share = scale.share(value);
  const name = scale.heat.kind === "around" ? (share < 0 ? "--heat-minus" : "--heat-plus") : "--heat";
  return `rgb(${colour(name)} / ${(Math.min(1, Math.abs(share)) * 0.82).toFixed(3)})`;
}

/** Every heat map of a response; attention as one per layer segment. */
export function allHeats(response) {
  const rows = [];
  for (const heat of listHeats([response])) {
    const segments = heat.key === "vision" ? response.segments : [""];
    for (const segment of segments) {
      const values = heatValues(heat, response, segment);
      if (values) rows.push({ heat, segment, values, scale: makeScale(heat, [response], segment), label: segment ? `vision, ${segment}` : heat.label });
    }
  }
  const layers = rows.filter((row) => row.segment);
  const strongest = layers.reduce((best, row) => (row.scale.high > best.high ? row.scale : best), layers[0]?.scale);
  for (const row of layers) row.scale = strongest; // one scale for all layers, so that they compare
  return rows;
}

export function makeLegend(scale) {
  if (scale.heat.kind === "choice") return { text: ["not kept", "kept"], stops: null };
  const steps = [0, 0.25, 0.5, 0.75, 1].map((share) => scale.low + share * (scale.high - scale.low));
  return { text: [number(scale.low), number(scale.high)], stops: steps.map((value) => paint(scale, value) || "transparent") };
}
