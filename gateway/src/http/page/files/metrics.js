// /metrics as small charts of the last minutes, and as the plain text that it is.

import { read } from "./api.js";
import { Chart } from "./chart.js";
import { byId, compact, count, h, percent, put, say, span, tell } from "./dom.js";
import { History, parse } from "./series.js";

export const period = 2000;

const history = new History();
const seconds = (value) => span(value * 1000);
const rate = (value) => `${value < 10 ? value.toFixed(1) : compact(value)}/s`;
const client = (labels) => labels.route?.startsWith("/v1/") || labels.route === "/generate";
const worker = (labels) => labels.worker.replace(/^\w+:\/\//, "");
const R = "branchline_router";
const W = "branchline_worker";

/** Lines of several series under names of their own. */
const named = (pairs) => pairs.flatMap(([name, lines]) => lines.map((line) => ({ ...line, name })));

// title, how a value is said, its lines
const CHARTS = [
  ["Requests by status", rate, () => history.rate(`${R}_requests_total`, "status", client)],
  ["Requests in flight", count, () => history.level(`${R}_requests_in_flight`)],
  ["Time to first token", seconds, () => history.quantiles(`${R}_time_to_first_token_seconds`, [0.5, 0.95])],
  ["Time between tokens", seconds, () => history.quantiles(`${R}_inter_token_seconds`, [0.5, 0.95])],
  ["Tokens", rate, () => named([
    ["prompt", history.rate(`${R}_prompt_tokens_total`)],
    ["cached", history.rate(`${R}_cached_tokens_total`)],
    ["completion", history.rate(`${R}_completion_tokens_total`)],
  ])],
  ["KV held", percent, () => history.level(`${W}_kv_usage_ratio`, worker)],
  ["Cache hits", percent, () => history.level(`${W}_cache_hit_ratio`, worker)],
  ["Running", count, () => history.level(`${W}_requests_running`, worker)],
  ["Waiting", count, () => history.level(`${W}_requests_waiting`, worker)],
  ["Evicted pages", rate, () => history.rate(`${W}_evicted_pages_total`, worker)],
  ["Errors by code", rate, () => history.rate(`${R}_errors_total`, "code")],
  ["Retries by reason", rate, () => history.rate(`${R}_retries_total`, "reason")],
];

const charts = CHARTS.map(([title, format, lines]) => ({ chart: new Chart(title, format), lines }));
let live = true;

/** Makes the charts. */
export function start() {
  const pause = h("button", { type: "button", class: "quiet", "aria-pressed": "false", on: { click: toggle } }, "Pause");
  function toggle() {
    live = !live;
    put(pause, "aria-pressed", !live);
    if (live) poll();
  }
  byId("metrics-tools").append(pause);
  byId("metrics-body").append(
    h("div", { class: "cards charts" }, charts.map(({ chart }) => chart.element)),
    h("details", { id: "metrics-text" }, h("summary", null, "All series as text"), h("pre", { class: "code", tabindex: 0, id: "metrics-raw" })));
}

/** Takes a picture of /metrics and draws. */
export async function poll() {
  if (!live) return;
  const place = byId("view-metrics").querySelector(".fault");
  try {
    const text = await read("metrics");
    tell(place, null);
    history.push(parse(text), performance.now() / 1000);
    for (const { chart, lines } of charts) chart.draw(lines());
    if (byId("metrics-text").open) say(byId("metrics-raw"), text);
  } catch (error) {
    tell(place, error);
  }
}
