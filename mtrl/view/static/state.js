// The state of the page. It is kept in the address, so that reloads, bookmarks and browser history restore it.

export const defaults = {
  tab: "curves", run: 0, from: "", to: "", latest: true, sort: "step", order: "", page: 0,
  min_reward: "", max_reward: "", min_tokens: "", max_tokens: "", min_dependency: "", max_dependency: "",
  step: null, row: null, heat: "dependency", segment: "all", view: "sample", smooth: 0.6, search: "",
};

export const state = { ...defaults };
export const live = { runs: [], error: "", glossary: {} }; // the last replies of the server about the runs
const listeners = new Set();

/** What a metric means, or null if there is no line on it. */
export const meaning = (metric) => (Object.hasOwn(live.glossary, metric) && live.glossary[metric]) || null;

export function onChange(listener) {
  listeners.add(listener);
}

/** Changes the state and notifies the listeners of the changed keys. */
export function set(changes) {
  const changed = Object.keys(changes).filter((key) => state[key] !== changes[key]);
  if (!changed.length) return;
  Object.assign(state, changes);
  writeAddress();
  notify(changed);
}

export function notify(changed) {
  for (const listener of listeners) listener(new Set(changed));
}

function writeAddress() {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(state))
    if (key !== "tab" && value !== defaults[key] && value !== null) query.set(key, value);
  const hash = `#${state.tab}${query.size ? `?${query}` : ""}`;
  if (hash !== location.hash) history.replaceState(null, "", hash);
}

/** Sets the state from the address. */
export function readAddress() {
  const [tab, query] = location.hash.slice(1).split("?");
  const given = new URLSearchParams(query ?? "");
  for (const [key, initial] of Object.entries(defaults)) {
    const text = given.get(key);
    if (key === "tab") state.tab = ["curves", "rollouts", "run"].includes(tab) ? tab : initial;
    else if (text === null) state[key] = initial;
    else if (typeof initial === "boolean") state[key] = text === "true";
    else state[key] = typeof initial === "number" || initial === null ? Number(text) || 0 : text;
  }
}

export const runColours = ["--run-0", "--run-1", "--run-2", "--run-3", "--run-4", "--run-5", "--run-6", "--run-7"];
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const runColour = (run) => colour(runColours[run % runColours.length]);

export const hidden = new Set(); // runs that are not drawn
