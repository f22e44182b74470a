// The cache of each engine: its radix tree as a picture, the chosen node in words, and all nodes as a table.

import { call } from "./api.js";
import { Faults, byId, count, fact, h, keyed, percent, plural, put, s, say, span } from "./dom.js";
import { Picture, SIGNS, describe } from "./picture.js";

export const period = 1500;

const faults = new Faults(byId("view-tree").querySelector(".fault"));
let [limit, text, live] = [200, false, true];

/** Makes the tools and the legend. */
export function start() {
  const most = h("select", { id: "tree-limit", on: { change: (event) => set(() => (limit = Number(event.target.value))) } },
    [50, 200, 1000, 5000].map((number) => h("option", { value: number, selected: number === limit }, `${count(number)} nodes`)));
  const words = h("input", { type: "checkbox", id: "tree-text", on: { change: (event) => set(() => (text = event.target.checked)) } });
  const pause = h("button", { type: "button", class: "quiet", "aria-pressed": "false", on: { click: toggle } }, "Pause");
  function toggle() {
    live = !live;
    put(pause, "aria-pressed", !live);
    if (live) poll();
  }
  byId("tree-tools").append(
    h("label", { for: "tree-limit", class: "hidden" }, "Nodes shown"), most,
    h("span", { class: "check" }, words, h("label", { for: "tree-text" }, "Show text")),
    pause);
  byId("tree-body").append(legend(), h("div", { id: "trees" }));
}

function set(change) {
  change();
  faults.acted(null);
  poll(true);
}

function legend() {
  const sign = (name) => h("span", { class: `swatch ${name}`, "aria-hidden": "true" });
  return h("p", { class: "legend dim" },
    "Longer: more tokens (by logarithm). Thicker: more hits. Last use: ",
    [["hot", "10 s"], ["warm", "1 min"], ["mild", "10 min"], ["cool", "1 h"], ["cold", "longer ago"]].map(([name, words]) => h("span", { class: "key" }, sign(name), words)),
    [["lock", "locked by a request or lease"], ["flag", "leased"]].map(([name, words]) =>
      h("span", { class: "key" }, s("svg", { class: "mark", width: 10, height: 12, viewBox: "-1 -6 10 12", "aria-hidden": "true" }, s("path", { d: SIGNS[name] })), words)),
    h("span", { class: "key" }, sign("host"), "in host memory"));
}

/** Asks for the trees. */
export async function poll(asked) {
  if (!live && !asked) return;
  try {
    const { workers } = await call(`cache/tree?limit=${limit}${text ? "&text=true" : ""}`);
    faults.polled(null);
    keyed(byId("trees"), workers, (worker) => worker.id, create, update);
  } catch (error) {
    // The text of others' prompts is an administrator's alone; the rest may be there all the same.
    if (error.status !== 403 || !text) return faults.polled(error);
    text = byId("tree-text").checked = false;
    faults.acted(error);
  }
}

const NAMES = ["Tokens", "From token", "Pages", "Hits", "Last use", "Locks", "Leases", "Tier", "Children", "Namespace", "Node"];

function create(worker) {
  const chosen = h("dl", { class: "facts" }, NAMES.map((name) => fact(name, "")));
  const said = h("pre", { class: "code node-text", hidden: true, tabindex: 0, "aria-label": "Text of the chosen node" });
  const picture = new Picture(`Radix tree of ${worker.id}`, (node) => choose(chosen, said, node));
  const rows = h("tbody");
  const table = h("details", { on: { toggle: () => table.open && poll(true) } }, h("summary", null, "As a table"),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Nodes of ${worker.id}` },
      h("table", null, h("thead", null, h("tr", null, NAMES.map((name) => h("th", { scope: "col" }, name)))), rows)));
  const element = h("section", { class: "card tree", "aria-label": worker.id },
    h("div", { class: "card-head" }, h("h3", null, worker.id), h("span", { class: "dim sum" })),
    h("p", { class: "dim none" }),
    h("div", { class: "scroll canvas" }, picture.element),
    h("div", { class: "chosen-node" }, h("h4", null, "Chosen node"), chosen, said),
    table);
  return Object.assign(element, { picture, rows, table });
}

function update(element, worker) {
  const nodes = worker.nodes ?? [];
  const why = worker.error?.message ?? (worker.supported === false ? "An HTTP worker has no such tree." : nodes.length === 0 ? "Nothing is cached." : "");
  say(element.querySelector(".none"), why);
  for (const part of [element.querySelector(".canvas"), element.querySelector(".chosen-node"), element.table]) part.hidden = nodes.length === 0;
  const { cache } = worker;
  const words = cache ? [
    plural(worker.nodes_total, "node"), plural(worker.namespaces_total, "namespace"),
    `${count(cache.pages_evictable + cache.pages_protected)} of ${plural(cache.pages_total, "page")} in the tree`, `${percent(cache.hit_rate)} of prompt tokens found`,
  ] : [];
  if (worker.truncated) words.push(`the first ${count(nodes.length)} are shown`);
  say(element.querySelector(".sum"), words.join(" · "));
  element.picture.show(nodes);
  if (element.table.open) keyed(element.rows, nodes, (node) => node.node, () => h("tr", null, NAMES.map(() => h("td"))), (row, node) => fill(row.children, node));
}

const values = (node) => [
  count(node.tokens), count(node.depth_tokens), count(node.pages), count(node.hits), `${span(node.age_ms)} ago`, count(node.locks), count(node.leases),
  node.tier, count(node.children), node.namespace, String(node.node),
];

function fill(cells, node) {
  values(node).forEach((value, at) => say(cells[at], value));
}

function choose(list, said, node) {
  put(list, "aria-label", describe(node));
  values(node).forEach((value, at) => say(list.children[at].lastChild, value));
  said.hidden = typeof node.text !== "string";
  if (!said.hidden) say(said, node.text);
}
