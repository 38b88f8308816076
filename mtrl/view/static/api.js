// The source of the data: the server, or the page itself if it is a report.

const embedded = document.getElementById("embedded");
const report = embedded ? JSON.parse(embedded.textContent) : null;

export const isReport = report !== null;
export const about = report?.about ?? null;

async function request(name, parameters) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  const reply = await fetch(`/api/${name}?${query}`);
  if (!reply.ok) throw new Error((await reply.text()).trim() || `${reply.status}`);
  return name === "config" ? reply.text() : reply.json();
}

export async function runs() {
  return report ? report.runs : request("runs", {});
}

export async function series(run, names) {
  if (!names.length) return {};
  if (report) return Object.fromEntries(names.map((name) => [name, report.series[run][name] ?? [[], []]]));
  return request("series", { run, names: names.join(",") });
}

/** A line on each metric of the runs, by name; empty if there is none. */
export async function glossary() {
  return report ? report.glossary : request("glossary", {});
}

export async function rollouts(run, query) {
  return report ? select(report.rollouts[run], query) : request("rollouts", { run, ...query });
}

export async function response(run, step, row) {
  if (!report) return request("response", { run, step, row });
  const one = report.rollouts[run].find((each) => each.step === step && each.row === row);
  if (!one) throw new Error("this response is not in the report");
  return one;
}

export async function group(run, step, row) {
  if (!report) return request("group", { run, step, row });
  const one = await response(run, step, row);
  return report.rollouts[run].filter((each) => each.step === step && one.members.includes(each.row));
}

/** The responses of another run to a prompt, by its id. */
export async function sameGroup(run, step, id) {
  return report ? report.rollouts[run].filter((each) => each.step === step && each.id === id) : request("group", { run, step, id });
}

/** The attention of each token on the image: {levels: one byte per token and image token, scale: one number per token}. */
export async function maps(run, step, row) {
  const maps = report ? report.maps?.[`${run} ${step} ${row}`] : await request("maps", { run, step, row });
  if (!maps) throw new Error("the attention maps of this response are not in the report");
  return { scale: maps.scale, levels: Uint8Array.from(atob(maps.levels), (sign) => sign.charCodeAt(0)) };
}

export async function config(run) {
  return report ? report.config[run] ?? "" : request("config", { run });
}

export function image(run, step, key) {
  return report ? report.images[key] ?? "" : `/api/image?${new URLSearchParams({ run, step, key })}`;
}

/** Does what the server does with a query, for the responses of a report. */
function select(all, query) {
  const between = (value, low, high) =>
    (low === "" || low === undefined || (value ?? NaN) >= Number(low)) && (high === "" || high === undefined || (value ?? NaN) <= Number(high));
  let rows = all.filter((row) => between(row.step, query.from, query.to));
  for (const name of ["reward", "tokens", "dependency", "entropy", "vision", "advantage"])
    rows = rows.filter((row) => between(row[name], query[`min_${name}`], query[`max_${name}`]));
  const sign = query.order === "desc" ? -1 : 1;
  const key = (row) => row[query.sort];
  const rewards = new Map(); // of each group
  for (const row of all) rewards.set(`${row.step} ${row.group}`, (rewards.get(`${row.step} ${row.group}`) ?? new Set()).add(row.reward));
  const teachesNothing = (row) => rewards.get(`${row.step} ${row.group}`).size < 2;
  rows.sort((a, b) => {
    if (query.sort === "step") return sign * (a.step - b.step) || teachesNothing(a) - teachesNothing(b) || a.row - b.row;
    const lacking = (key(a) == null) - (key(b) == null);
    return lacking || sign * ((key(a) ?? 0) - (key(b) ?? 0)) || a.step - b.step || a.row - b.row;
  });
  const start = query.page * query.size;
  return { total: rows.length, page: query.page, size: query.size, rows: rows.slice(start, start + query.size) };
}
