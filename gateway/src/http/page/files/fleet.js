// The fleet: each worker with its health, load and KV use; operators add, drain and remove workers and flush caches.

import { call } from "./api.js";
import { Faults, ask, byId, count, fact, field, h, keyed, percent, plural, put, say, span } from "./dom.js";

export const period = 1500;

const view = () => byId("view-fleet");
const faults = new Faults(view().querySelector(".fault"));
let may = false;

/** Makes the tools, the totals and the cards' place. */
export function start() {
  byId("fleet-tools").append(
    h("button", { type: "button", class: "quiet change", on: { click: flush } }, "Flush caches"),
    h("details", { class: "drop" }, h("summary", null, "Add a worker"), adding()));
  byId("fleet-body").append(
    h("dl", { id: "fleet-totals", class: "facts totals" }),
    h("p", { id: "fleet-empty", class: "notice", hidden: true }, "No worker. Start one with --worker-urls, or add one here."),
    h("ul", { id: "workers", class: "cards", "aria-label": "Workers" }),
    h("p", { id: "fleet-said", class: "hidden", role: "status" }));
}

/** Whether changes are offered. */
export function allow(value) {
  may = value;
  for (const control of view().querySelectorAll(".change")) {
    control.disabled = !may;
    put(control, "title", may ? null : "needs an administrator's key");
  }
}

function adding() {
  const url = field("worker-url", "Address", h("input", { type: "url", placeholder: "grpc://host:port or http://host:port", required: true, class: "change" }));
  const form = h("form", { class: "card" }, url, h("button", { type: "submit", class: "strong change" }, "Add"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    change("The worker is added; it shows as ready once it is reached.", () => call("workers", { method: "POST", json: { url: byId("worker-url").value } }));
  });
  return form;
}

/** Makes a change, says how it went, and looks again. */
async function change(words, act) {
  try {
    await act();
    faults.acted(null);
    say(byId("fleet-said"), words);
    await poll();
  } catch (error) {
    faults.acted(error);
  }
}

async function flush() {
  const yes = await ask("Flush all caches?", "Every page that no request holds is dropped; the next prompts are computed from their beginning.", "Flush");
  if (yes) await change("The caches are flushed.", () => call("flush_cache", { method: "POST" }));
}

/** Asks for workers and their reports. */
export async function poll() {
  try {
    const [{ workers }, info] = await Promise.all([call("workers"), call("server_info")]);
    const reports = new Map(info.workers.map((report) => [report.id, report]));
    const shown = workers.map((worker) => ({ ...worker, report: reports.get(worker.id) ?? {} }));
    faults.polled(null);
    totals(shown, info);
    byId("fleet-empty").hidden = shown.length > 0;
    announce(shown);
    keyed(byId("workers"), shown, (worker) => worker.id, create, update);
    allow(may);
  } catch (error) {
    faults.polled(error);
  }
}

let before = new Map();

/** Says aloud which workers came and went, since colours can't be heard. */
function announce(workers) {
  const now = new Map(workers.map((worker) => [worker.id, worker.ready]));
  const changed = workers.filter((worker) => before.has(worker.id) && before.get(worker.id) !== worker.ready);
  before = now;
  if (changed.length > 0) say(byId("fleet-said"), changed.map((worker) => `${worker.id} is ${worker.ready ? "ready" : "down"}`).join(", "));
}

function totals(workers, { cache, policy }) {
  const ready = workers.filter((worker) => worker.ready).length;
  const held = cache.pages_protected + cache.pages_private;
  const facts = [
    ["Ready", `${ready} of ${workers.length}`],
    ["In flight", count(workers.reduce((sum, worker) => sum + (worker.in_flight ?? 0), 0))],
    ["KV held", percent(held / cache.pages_total)],
    ["Cache hits", percent(cache.hit_rate)],
    ["Pages cached", count(cache.pages_evictable + cache.pages_protected)],
    ["Policy", policy],
  ];
  keyed(byId("fleet-totals"), facts, ([label]) => label, ([label]) => fact(label, ""), (element, [, value]) => say(element.lastChild, value));
}

/** How a worker is: a word and a tone. A worker that can't be chosen is red, whatever the reason. */
function condition(worker) {
  if (worker.draining) return ["draining", "warm"];
  if (!worker.ready && worker.status === "Pending") return ["starting", "warm"];
  if (!worker.ready) return ["down", "bad"];
  if (worker.breaker && worker.breaker !== "closed") return [`breaker ${worker.breaker}`, "bad"];
  return ["ready", "good"];
}

const LINES = ["Model", "Running", "Waiting", "In flight", "Queue age", "Step age", "Cache hits", "Prompt tokens", "Leases", "Steps", "Uptime", "Source"];

function create() {
  return h("li", { class: "card worker" },
    h("div", { class: "card-head" }, h("span", { class: "dot", "aria-hidden": "true" }), h("h3"), h("span", { class: "chip state" })),
    h("p", { class: "dim mono url" }),
    h("p", { class: "reason" }),
    h("div", { class: "kv" }, h("p", { class: "kv-label dim" }), h("div", { class: "bar", role: "img" }, h("i", { class: "held" }), h("i", { class: "leased" }), h("i", { class: "cached" }))),
    h("dl", { class: "facts" }, LINES.map((label) => fact(label, ""))),
    h("div", { class: "row end" },
      h("button", { type: "button", class: "quiet small change drain" }),
      h("button", { type: "button", class: "quiet small change remove" }, "Remove")));
}

function update(element, worker) {
  const [word, tone] = condition(worker);
  element.className = `card worker ${tone}`;
  say(element.querySelector("h3"), worker.id);
  const state = element.querySelector(".state");
  state.className = `chip state ${tone}`;
  say(state, word);
  say(element.querySelector(".url"), worker.url);
  const reason = worker.ready ? worker.report.error?.message : worker.reason;
  say(element.querySelector(".reason"), reason || (worker.health && worker.health !== "well" ? `health: ${worker.health}` : ""));
  pages(element, worker.report.cache);
  facts(element, worker);
  const drain = element.querySelector(".drain");
  say(drain, worker.draining ? "Resume" : "Drain");
  put(drain, "aria-label", `${drain.textContent} ${worker.id}`);
  drain.onclick = () => change(`${worker.id} ${worker.draining ? "takes requests again" : "gets no new request"}.`, () => call(path(worker), { method: "PATCH", json: { draining: !worker.draining } }));
  const remove = element.querySelector(".remove");
  put(remove, "aria-label", `Remove ${worker.id}`);
  remove.onclick = async () => {
    const yes = await ask(`Remove ${worker.id}?`, `${worker.url} gets no new request and leaves the fleet.`, "Remove");
    if (yes) await change(`${worker.id} is removed.`, () => call(path(worker), { method: "DELETE" }));
  };
}

const path = (worker) => `workers/${encodeURIComponent(worker.id)}`;

/** The pool as one bar: what requests hold, what leases hold, what is only cached; the rest is free. */
function pages(element, cache) {
  const place = element.querySelector(".kv");
  place.hidden = !cache?.pages_total;
  if (place.hidden) return;
  const held = cache.pages_protected - cache.pages_leased + cache.pages_private;
  const parts = { held, leased: cache.pages_leased, cached: cache.pages_evictable };
  const share = (pages) => (100 * Math.max(0, pages)) / cache.pages_total;
  for (const [name, pages] of Object.entries(parts)) place.querySelector(`.${name}`).style.width = `${share(pages)}%`;
  const words = `KV: ${count(held)} held, ${count(cache.pages_leased)} leased, ${count(cache.pages_evictable)} cached of ${plural(cache.pages_total, "page")}`;
  say(place.querySelector(".kv-label"), words);
  put(place.querySelector(".bar"), "aria-label", words);
}

function facts(element, worker) {
  const { load, cache, steps, uptime_s: uptime } = worker.report;
  const values = {
    Model: worker.models?.[0] ?? "–",
    Running: count(load?.running),
    Waiting: count(load?.waiting),
    "In flight": count(worker.in_flight),
    "Queue age": load ? span(load.queue_age_ms) : "–",
    "Step age": load ? span(load.step_age_ms) : "–",
    "Cache hits": cache ? percent(cache.hit_rate) : "–",
    "Prompt tokens": count(cache?.prompt_tokens),
    Leases: count(cache?.leases),
    Steps: count(steps),
    Uptime: uptime === undefined ? "–" : span(uptime * 1000),
    Source: worker.source?.kind ?? "–",
  };
  for (const row of element.querySelector(".facts").children) say(row.lastChild, values[row.firstChild.textContent]);
}
