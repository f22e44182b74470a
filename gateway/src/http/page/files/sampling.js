// The form of model and sampling: what it offers, and the request's fields that it stands for.

import { call } from "./api.js";
import { byId, field, h, readJson } from "./dom.js";

// name, label, attributes of the input, help
const NUMBERS = [
  ["temperature", "Temperature", { min: 0, step: 0.1 }, "0 takes the most likely token"],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "Top k", { min: -1, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["max_tokens", "Longest answer, tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { step: 1 }, "the same seed draws the same numbers"],
];

/** Fills the form. `reload` asks for the models again. */
export function build(form, reload) {
  const number = ([name, label, limits, help]) =>
    field(`s-${name}`, label, h("input", { type: "number", inputmode: "decimal", placeholder: "default", ...limits }), help);
  const model = field("s-model", "Model", h("select", { class: "grow" }));
  form.append(
    h("div", { class: "row bottom" }, model, h("button", { type: "button", class: "quiet", "aria-label": "Load the models again", on: { click: reload } }, "↻")),
    field("s-system", "System message", h("textarea", { rows: 2, placeholder: "none" })),
    h("div", { class: "pairs" }, NUMBERS.map(number)),
    field("s-stop", "Stop strings", h("textarea", { rows: 1, placeholder: "none" }), "one a line"),
    field(
      "s-extra",
      "Further fields (JSON)",
      h("textarea", { rows: 2, class: "code", spellcheck: "false", placeholder: '{"logit_bias": {}}' }),
      "wins over the fields above",
    ),
    h("div", { class: "check" }, h("input", { type: "checkbox", id: "s-stream", checked: true }), h("label", { for: "s-stream" }, "Stream the answer")),
  );
  byId("s-max_tokens").value = 256;
  form.addEventListener("submit", (event) => event.preventDefault());
}

/** Asks for the models and keeps the choice, if it is still there. Throws a Fault where none is served. */
export async function loadModels() {
  const select = byId("s-model");
  const { data } = await call("v1/models");
  const [before, names] = [select.value, data.map((model) => model.id)];
  select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
  if (names.includes(before)) select.value = before;
  return names;
}

/** The form as fields of a request, without its messages. Throws an Error for what is no number or no JSON. */
export function fields() {
  mark(null);
  const body = { model: byId("s-model").value || "default" };
  for (const [name, label] of NUMBERS) {
    const input = byId(`s-${name}`);
    if (input.validity.badInput) throw named(name, `${label}: this is not a number`);
    if (input.value !== "") body[name] = Number(input.value);
  }
  const stop = byId("s-stop").value.split("\n").filter((line) => line !== "");
  if (stop.length > 0) body.stop = stop;
  body.stream = byId("s-stream").checked;
  if (body.stream) body.stream_options = { include_usage: true };
  let extra;
  try {
    extra = readJson(byId("s-extra").value, "Further fields");
  } catch (error) {
    throw named("extra", error.message);
  }
  return { ...body, ...extra };
}

function named(name, message) {
  return Object.assign(new Error(message), { field: name });
}

/** Marks the control of a request's field as wrong and opens the form, or takes all marks away. */
export function mark(name) {
  for (const control of byId("sampling").elements) control.removeAttribute("aria-invalid");
  const control = name && byId(`s-${name}`);
  if (!control) return false;
  byId("settings").open = true;
  control.setAttribute("aria-invalid", "true");
  control.focus();
  return true;
}

/** What the system message says. */
export const system = () => byId("s-system").value;
