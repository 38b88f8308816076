// Where data come from: the server beside this page, or the page itself where it is a report.

const embedded = document.getElementById("embedded");
const held = embedded ? JSON.parse(embedded.textContent) : null;

export const isReport = held !== null;
export const about = held?.about ?? null;

async function ask(name, parameters) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  const answer = await fetch(`/api/${name}?${query}`);
  if (!answer.ok) throw new Error((await answer.text()).trim() || `${answer.status}`);
  return name === "config" ? answer.text() : answer.json();
}

export async function runs() {
  return held ? held.runs : ask("runs", {});
}

export async function series(run, names, after = -1) {
  if (!names.length) return {};
  if (held) return Object.fromEntries(names.map((name) => [name, held.series[run][name] ?? [[], []]]));
  return ask("series", { run, names: names.join(","), after });
}

export async function rollouts(run, query) {
  return held ? chosen(held.rollouts[run], query) : ask("rollouts", { run, ...query });
}

export async function response(run, step, row) {
  if (!held) return ask("response", { run, step, row });
  const found = held.rollouts[run].find((each) => each.step === step && each.row === row);
  if (!found) throw new Error("this response is not in the report");
  return found;
}

export async function group(run, step, row) {
  if (!held) return ask("group", { run, step, row });
  const one = await response(run, step, row);
  return held.rollouts[run].filter((each) => each.step === step && one.members.includes(each.row));
}

/** The responses of another run to a prompt, by its id. */
export async function sameGroup(run, step, id) {
  return held ? held.rollouts[run].filter((each) => each.step === step && each.id === id) : ask("group", { run, step, id });
}

/** Where each token of a response looks: {levels: a byte for each token and image token, scale: a number a token}. */
export async function maps(run, step, row) {
  const found = held ? held.maps?.[`${run} ${step} ${row}`] : await ask("maps", { run, step, row });
  if (!found) throw new Error("its attention maps are not in the report");
  return { scale: found.scale, levels: Uint8Array.from(atob(found.levels), (sign) => sign.charCodeAt(0)) };
}

export async function config(run) {
  return held ? held.config[run] ?? "" : ask("config", { run });
}

export function image(run, step, key) {
  return held ? held.images[key] ?? "" : `/api/image?${new URLSearchParams({ run, step, key })}`;
}

/** What the server does with a query, for the few responses of a report. */
function chosen(all, query) {
  const between = (value, low, high) =>
    (low === "" || low === undefined || (value ?? NaN) >= Number(low)) && (high === "" || high === undefined || (value ?? NaN) <= Number(high));
  let rows = all.filter((row) => between(row.step, query.from, query.to));
  for (const name of ["reward", "tokens", "dependency", "entropy", "vision", "advantage"])
    rows = rows.filter((row) => between(row[name], query[`min_${name}`], query[`max_${name}`]));
  const sign = query.order === "desc" ? -1 : 1;
  const key = (row) => row[query.sort];
  rows.sort((a, b) => {
    const lacking = (key(a) == null) - (key(b) == null);
    return lacking || sign * ((key(a) ?? 0) - (key(b) ?? 0)) || a.step - b.step || a.row - b.row;
  });
  const start = query.page * query.size;
  return { total: rows.length, page: query.page, size: query.size, rows: rows.slice(start, start + query.size) };
}
