// WebAssembly middleware: what is loaded, and for operators an upload, dry runs, settings and removal.

import { call } from "./api.js";
import { Faults, ask, byId, count, fact, field, h, keyed, put, readJson, say } from "./dom.js";

export const period = 4000;

const view = () => byId("view-modules");
const faults = new Faults(view().querySelector(".fault"));
let may = false;

/** Makes the list and the form of uploads. */
export function start() {
  byId("modules-body").append(
    h("div", { class: "split" },
      h("div", null,
        h("p", { id: "modules-none", class: "dim" }),
        h("ul", { id: "modules", class: "cards stack", "aria-label": "Modules, first asked first" })),
      upload()),
    h("p", { id: "modules-said", class: "notice good", role: "status", hidden: true }));
}

/** Whether changes are offered. */
export function allow(value) {
  may = value;
  for (const control of view().querySelectorAll(".change")) {
    control.disabled = !may;
    put(control, "title", may ? null : "needs an administrator's key");
  }
}

/** Asks for the modules. */
export async function poll() {
  try {
    const { modules, runtime } = await call("wasm");
    faults.polled(null);
    say(byId("modules-none"), modules.length > 0 ? "" : runtime ? "No module is loaded: requests pass as they are." : "This router was built without the runtime that modules need; see docs/middleware.md.");
    keyed(byId("modules"), modules, (module) => module.uuid, create, update);
    allow(may);
  } catch (error) {
    faults.polled(error);
  }
}

async function change(words, act) {
  try {
    await act();
    faults.acted(null);
    say(byId("modules-said"), words);
    byId("modules-said").hidden = false;
    await poll();
    return true;
  } catch (error) {
    byId("modules-said").hidden = true;
    faults.acted(error);
    return false;
  }
}

function upload() {
  const form = h("form", { class: "card", "aria-labelledby": "h-upload" },
    h("h3", { id: "h-upload" }, "Load a module"),
    field("up-file", "Component (.wasm)", h("input", { type: "file", accept: ".wasm,application/wasm", required: true, class: "change" })),
    field("up-name", "Name", h("input", { type: "text", placeholder: "the file's", spellcheck: "false", class: "change" })),
    field("up-settings", "Settings (JSON)", h("textarea", { rows: 4, class: "code change", spellcheck: "false", placeholder: '{"order": 5, "routes": {"paths": ["/v1/*"]}}' })),
    h("button", { type: "submit", class: "strong change" }, "Load"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const settings = byId("up-settings");
    settings.removeAttribute("aria-invalid");
    let given;
    try {
      given = readJson(settings.value, "Settings");
    } catch (error) {
      settings.setAttribute("aria-invalid", "true");
      settings.focus();
      return faults.acted(error);
    }
    const name = byId("up-name").value.trim();
    const body = new FormData();
    body.append("module", byId("up-file").files[0]);
    body.append("settings", JSON.stringify(name ? { ...given, name } : given));
    if (await change("The module is loaded.", () => call("wasm", { method: "POST", body }))) form.reset();
  });
  return form;
}

const LINES = ["Hooks", "Order", "Fails", "Routes", "Calls", "Failures", "Size"];

function create(module) {
  const id = `m-${module.uuid}`;
  const title = h("h3", { id });
  const output = h("pre", { class: "code", tabindex: 0, hidden: true, "aria-live": "polite" });
  const sample = h("textarea", { rows: 6, class: "code", spellcheck: "false", value: sampleOf(module) });
  const dry = h("details", { class: "dry" }, h("summary", null, "Dry run"),
    field(`${id}-sample`, "Sample (JSON)", sample, "The hook is called with this; nothing is stored, sent or counted."),
    h("div", { class: "row end" }, h("button", { type: "button", class: "quiet change", on: { click: () => tryOut(module.uuid, sample, output) } }, "Run")),
    output);
  return h("li", { class: "card module", role: "group", "aria-labelledby": id },
    h("div", { class: "card-head" }, h("span", { class: "dot", "aria-hidden": "true" }), title, h("span", { class: "chip state" })),
    h("dl", { class: "facts" }, LINES.map((label) => fact(label, ""))),
    dry,
    h("details", { class: "logs", on: { toggle: (event) => event.target.open && logs(module.uuid, event.target) } }, h("summary", null, "Log"), h("pre", { class: "code", tabindex: 0 })),
    h("div", { class: "row end" },
      h("button", { type: "button", class: "quiet small change switch" }),
      h("button", { type: "button", class: "quiet small change remove" }, "Remove")));
}

function update(element, module) {
  const { name, enabled, order, fail, routes } = module.settings;
  const [word, tone] = module.quarantined ? ["quarantined", "bad"] : enabled ? ["on", "good"] : ["off", "warm"];
  element.className = `card module ${tone}`;
  say(element.querySelector("h3"), `${name} v${module.version}`);
  const state = element.querySelector(".state");
  state.className = `chip state ${tone}`;
  say(state, word);
  const values = {
    Hooks: module.hooks.join(", "), Order: String(order), Fails: fail, Routes: shown(routes), Calls: count(module.calls),
    Failures: count(module.failures), Size: `${(module.module_meta.size_bytes / 1024).toFixed(1)} KiB`,
  };
  for (const row of element.querySelector(".facts").children) say(row.lastChild, values[row.firstChild.textContent]);
  const flip = element.querySelector(".switch");
  say(flip, enabled ? "Switch off" : "Switch on");
  put(flip, "aria-label", `${flip.textContent} ${name}`);
  flip.onclick = () => change(`${name} is ${enabled ? "off" : "on"}.`, () => call(`wasm/${module.uuid}`, { method: "PATCH", json: { enabled: !enabled } }));
  const remove = element.querySelector(".remove");
  put(remove, "aria-label", `Remove ${name}`);
  remove.onclick = async () => {
    const yes = await ask(`Remove ${name}?`, "Requests that have begun end with it; the next ones pass without it.", "Remove");
    if (yes) await change(`${name} is removed.`, () => call(`wasm/${module.uuid}`, { method: "DELETE" }));
  };
}

function shown(routes) {
  const words = Object.values(routes ?? {}).flat().filter((word) => typeof word === "string");
  return words.length > 0 ? words.join(", ") : "all";
}

/** A sample for the module's first hook. */
function sampleOf({ hooks }) {
  const request = { method: "POST", path: "/v1/chat/completions", body: JSON.stringify({ messages: [{ role: "user", content: "Hello" }] }) };
  const more = {
    "on-response": { response: { status: 200, body: "{}" } },
    "on-error": { failure: { status: 503, code: "unavailable" } },
    "on-stream-event": { event: { data: '{"choices": []}' } },
    "on-route": { request: undefined, route: { candidates: [] } },
  };
  return JSON.stringify({ hook: hooks[0], request, ...more[hooks[0]] }, null, 1);
}

async function tryOut(uuid, sample, output) {
  sample.removeAttribute("aria-invalid");
  try {
    const told = await call(`wasm/${uuid}/dry-run`, { method: "POST", json: readJson(sample.value, "Sample") });
    faults.acted(null);
    output.hidden = false;
    say(output, JSON.stringify(told, null, 2));
  } catch (error) {
    output.hidden = true;
    sample.setAttribute("aria-invalid", "true");
    sample.focus();
    faults.acted(error);
  }
}

async function logs(uuid, place) {
  try {
    const { lines } = await call(`wasm/${uuid}/logs`);
    const text = lines.map((line) => `${new Date(line.at_ms).toLocaleTimeString()} ${line.level} ${line.message}`).join("\n");
    say(place.querySelector("pre"), text || "Nothing was logged.");
  } catch (error) {
    faults.acted(error);
  }
}
