// Routing decisions: the latest ones, and any request's by its id, each with its candidates and the reason.

import { call } from "./api.js";
import { Faults, byId, compact, count, h, keyed, percent, put, say, span } from "./dom.js";

export const period = 2500;

const faults = new Faults(byId("view-routing").querySelector(".fault"));
let paused = false;

/** Makes the tools and the list. */
export function start() {
  const input = h("input", { id: "routing-id", type: "search", placeholder: "x-request-id or rid", spellcheck: "false" });
  const find = h("form", { class: "row", role: "search" }, h("label", { for: "routing-id", class: "hidden" }, "Request id"), input, h("button", { type: "submit", class: "quiet" }, "Explain"));
  find.addEventListener("submit", (event) => {
    event.preventDefault();
    explain(input.value.trim());
  });
  const pause = h("button", { type: "button", class: "quiet", "aria-pressed": "false", on: { click: toggle } }, "Pause");
  function toggle() {
    paused = !paused;
    put(pause, "aria-pressed", paused);
    if (!paused) poll();
  }
  byId("routing-tools").append(find, pause);
  byId("routing-body").append(
    h("div", { id: "routing-found" }),
    h("p", { id: "routing-empty", class: "dim" }, "No request has been routed yet. Send one in the chat."),
    h("ol", { id: "routing-list", class: "cards stack", "aria-label": "Latest decisions, newest first" }),
  );
}

/** Shows the latest choices. */
export async function poll() {
  if (paused) return;
  try {
    const { choices } = await call("explain?limit=60");
    faults.polled(null);
    const numbered = number(choices);
    keyed(byId("routing-list"), numbered, (choice) => choice.key, create, update);
    byId("routing-empty").hidden = choices.length > 0;
  } catch (error) {
    faults.polled(error);
  }
}

/** Retries have their request's id: the oldest is the first try. */
function number(choices) {
  const seen = new Map();
  const numbered = [...choices].reverse().map((choice) => {
    const tries = (seen.get(choice.request) ?? 0) + 1;
    seen.set(choice.request, tries);
    return { ...choice, key: `${choice.request}#${tries}`, tries };
  });
  return numbered.reverse();
}

function create(choice) {
  const line = h("summary", null,
    h("span", { class: "age dim" }),
    h("strong", { class: "route" }, choice.chosen),
    h("span", { class: "grow" }, choice.model ?? "any model"),
    h("span", { class: "chip" }, `${compact(cachedOf(choice))} of ${compact(choice.prompt_tokens)} cached`),
    choice.tries > 1 ? h("span", { class: "chip warm" }, `try ${choice.tries}`) : null);
  const name = choice.tag ?? choice.request;
  return h("li", { class: "card" }, h("details", null, line, h("p", { class: "dim mono" }, `request ${name}`), decision(choice)));
}

function update(element, choice) {
  say(element.querySelector(".age"), span(choice.age_ms));
}

const cachedOf = (choice) => choice.candidates.find((candidate) => candidate.chosen)?.cached_tokens ?? 0;

async function explain(id) {
  const place = byId("routing-found");
  faults.acted(null);
  if (id === "") return place.replaceChildren();
  try {
    const { choices } = await call(`explain/${encodeURIComponent(id)}`);
    const shown = choices.map((choice, at) => [h("h4", null, choices.length > 1 ? `Try ${at + 1}: ${choice.chosen}` : `Went to ${choice.chosen}`), decision(choice)]);
    place.replaceChildren(h("section", { class: "card found" }, h("h3", null, `Request ${id}`), shown.flat()));
  } catch (error) {
    place.replaceChildren();
    faults.acted(error);
  }
}

/** One decision in full: its reason, and each candidate with what it would have cost. */
export function decision(choice) {
  const most = Math.max(...choice.candidates.map((candidate) => candidate.cost), 1);
  const row = (candidate) =>
    h("tr", { class: candidate.chosen ? "chosen" : null },
      h("th", { scope: "row", title: candidate.url }, candidate.worker, candidate.chosen ? h("span", { class: "hidden" }, " (chosen)") : null),
      h("td", null, count(candidate.cached_tokens)),
      h("td", null, count(candidate.uncached_tokens)),
      h("td", null, count(candidate.queued_tokens)),
      h("td", null, count(candidate.running)),
      h("td", null, percent(candidate.kv_usage)),
      h("td", { class: "cost" }, h("meter", { min: 0, max: most, value: candidate.cost, "aria-hidden": "true" }), ` ${compact(candidate.cost)}`));
  const left = choice.left_out?.length ? h("p", { class: "dim" }, `Left out: ${choice.left_out.join(", ")}.`) : null;
  const rest = choice.candidates_in_all - choice.candidates.length;
  return h("div", { class: "decision" },
    h("p", null, choice.reason.startsWith(choice.policy) ? null : h("span", { class: "chip" }, choice.policy), ` ${choice.reason}.`),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Candidates" },
      h("table", null,
        h("thead", null, h("tr", null, ["Worker", "Cached", "To compute", "Queued", "Running", "KV", "Cost"].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", null, choice.candidates.map(row)))),
    rest > 0 ? h("p", { class: "dim" }, `${rest} more candidates were dearer.`) : null,
    left);
}
