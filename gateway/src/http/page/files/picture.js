// The radix tree of one worker as a picture that can be walked with the arrow keys.

import { count, keyed, plural, put, s, say, span } from "./dom.js";
import { heatOf, layout, thicknessOf } from "./layout.js";

/** Signs of what holds a node, 10 pixels high around their middle. */
export const SIGNS = {
  lock: "M0 -1h8v6h-8zM1.5 -1v-1.5a2.5 2.5 0 0 1 5 0v1.5h-1.2v-1.4a1.3 1.3 0 0 0 -2.6 0v1.4z",
  flag: "M0 -5h1.4v1h6.6l-2 2.5 2 2.5h-6.6v4h-1.4z",
};
const HEAT = ["cold", "cool", "mild", "warm", "hot"];

/** A node in words. */
export function describe(node) {
  const holders = [
    node.locks ? plural(node.locks, "lock") : "no lock",
    node.leases ? plural(node.leases, "lease") : "no lease",
  ];
  return [
    `${plural(node.tokens, "token")} from ${count(node.depth_tokens)}`,
    `${plural(node.pages, "page")} on ${node.tier}`,
    plural(node.hits, "hit"),
    `used ${span(node.age_ms)} ago`,
    ...holders,
    node.children === 1 ? "1 child" : `${count(node.children)} children`,
  ].join(", ");
}

export class Picture {
  #chosen = null;
  #spots = [];
  #onChoose;

  /** `onChoose(node)` is called for a node that is chosen by click, or by the keys. */
  constructor(label, onChoose) {
    this.#onChoose = onChoose;
    this.links = s("g", { "aria-hidden": "true", class: "links" });
    this.nodes = s("g", { role: "presentation" });
    this.element = s("svg", { class: "picture", role: "tree", "aria-label": label }, this.links, this.nodes);
    this.element.addEventListener("keydown", (event) => this.#walk(event));
  }

  /** Shows these nodes; the chosen one stays chosen while it is there. */
  show(nodes) {
    const { spots, width, height } = layout(nodes);
    this.#spots = spots;
    put(this.element, "width", Math.ceil(width));
    put(this.element, "height", Math.ceil(height));
    put(this.element, "viewBox", `0 0 ${Math.ceil(width)} ${Math.ceil(height)}`);
    const chosen = spots.find((spot) => spot.node.node === this.#chosen) ?? spots[0];
    this.#chosen = chosen?.node.node ?? null;
    keyed(this.links, spots.filter((spot) => spot.parent), (spot) => spot.node.node, () => s("path"), drawLink);
    keyed(this.nodes, spots, (spot) => spot.node.node, (spot) => this.#create(spot), (element, spot) => this.#update(element, spot));
    if (chosen) this.#onChoose(chosen.node);
  }

  #create(spot) {
    const id = spot.node.node;
    const group = s("g", { role: "treeitem", class: "node" },
      s("rect", { class: "ring", rx: 8 }), s("rect", { class: "line" }), s("text", { class: "size" }), s("path", { class: "mark", d: SIGNS.lock }), s("path", { class: "mark", d: SIGNS.flag }), s("title"));
    group.addEventListener("click", () => this.#choose(id, true));
    group.addEventListener("focus", () => this.#choose(id, false));
    return group;
  }

  #update(group, { node, x, y, width, level, place, among }) {
    const [ring, line, size, lock, flag, title] = group.children;
    const thick = thicknessOf(node.hits);
    const held = node.locks > 0 ? " held" : "";
    put(group, "class", `node ${HEAT[heatOf(node.age_ms)]}${held}${node.tier === "host" ? " host" : ""}`);
    put(group, "transform", `translate(${x.toFixed(1)} ${y})`);
    put(group, "tabindex", node.node === this.#chosen ? 0 : -1);
    put(group, "aria-selected", node.node === this.#chosen);
    put(group, "aria-level", level);
    put(group, "aria-posinset", place);
    put(group, "aria-setsize", among);
    put(group, "aria-expanded", node.children > 0 ? "true" : null);
    put(group, "aria-label", describe(node));
    for (const [name, value] of Object.entries({ x: -5, y: -19, width: width + 10, height: 30 })) put(ring, name, value);
    for (const [name, value] of Object.entries({ x: 0, y: (-thick / 2).toFixed(1), width: width.toFixed(1), height: thick.toFixed(1), rx: (thick / 2).toFixed(1) })) put(line, name, value);
    put(size, "x", 2);
    put(size, "y", -thick / 2 - 4);
    say(size, count(node.tokens));
    // Above the end of the line, where no branch goes.
    put(lock, "transform", `translate(${(width - 8).toFixed(1)} ${-thick / 2 - 9})`);
    put(flag, "transform", `translate(${(width - 20).toFixed(1)} ${-thick / 2 - 9})`);
    put(lock, "display", node.locks ? null : "none");
    put(flag, "display", node.leases ? null : "none");
    say(title, describe(node));
  }

  #choose(id, focus) {
    this.#chosen = id;
    const spot = this.#spots.find((one) => one.node.node === id);
    for (const group of this.nodes.children) {
      const own = group.dataset.key === String(id);
      put(group, "tabindex", own ? 0 : -1);
      put(group, "aria-selected", own);
      if (own && focus) group.focus();
    }
    if (spot) this.#onChoose(spot.node);
  }

  /** Up and down in reading order, left to the parent, right to the first child. */
  #walk(event) {
    const at = this.#spots.findIndex((spot) => spot.node.node === this.#chosen);
    const here = this.#spots[at];
    if (!here) return;
    const child = this.#spots[at + 1];
    const next = {
      ArrowUp: this.#spots[at - 1],
      ArrowDown: child,
      ArrowLeft: here.parent,
      ArrowRight: child?.parent === here ? child : null,
      Home: this.#spots[0],
      End: this.#spots.at(-1),
    }[event.key];
    if (next === undefined && !["ArrowUp", "ArrowDown"].includes(event.key)) return;
    event.preventDefault();
    if (next) this.#choose(next.node.node, true);
  }
}

/** The way from a parent's end to a branch: straight in its row, else a curve down. */
function drawLink(path, { x, y, parent, node }) {
  const [from, to] = [parent.x + parent.width, x];
  const bend = (from + to) / 2;
  const way = parent.y === y ? `M${from} ${y}H${to}` : `M${from} ${parent.y}C${bend} ${parent.y} ${bend} ${y} ${to} ${y}`;
  put(path, "d", way);
  put(path, "class", HEAT[heatOf(node.age_ms)]);
}
