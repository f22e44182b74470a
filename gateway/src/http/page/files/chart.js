// A small chart of lines over time, in SVG, with its latest values in words.

import { h, keyed, put, s, say } from "./dom.js";

const [WIDTH, HEIGHT, EDGE] = [320, 100, 3];

export class Chart {
  /** `format(value)` gives a value in words with its unit. */
  constructor(title, format) {
    this.format = format;
    // The picture is stretched to its place; what is written stands beside it, for letters must not be.
    const grid = [0, 0.5, 1].map((share) => s("path", { class: "grid", d: `M0 ${level(share)}H${WIDTH}` }));
    this.lines = s("g");
    this.svg = s("svg", { class: "chart", role: "img", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" }, grid, this.lines);
    [this.top, this.ago] = [h("span", { class: "dim" }), h("span")];
    this.keys = h("ul", { class: "keys" });
    this.title = title;
    this.element = h("figure", { class: "card" },
      h("figcaption", null, title, " ", this.top), this.svg,
      h("p", { class: "axis dim", "aria-hidden": "true" }, this.ago, h("span", null, "now")), this.keys);
  }

  /** Draws `{name, points: [[seconds, value]]}` lines. */
  draw(lines) {
    const all = lines.flatMap((line) => line.points);
    const [first, last] = [Math.min(...all.map(([time]) => time)), Math.max(...all.map(([time]) => time))];
    const most = round(Math.max(...all.map(([, value]) => value), 0));
    const spread = Math.max(last - first, 1);
    const at = ([time, value]) => `${(((time - first) / spread) * WIDTH).toFixed(1)} ${level(value / most).toFixed(1)}`;
    const named = lines.map((line, index) => ({ ...line, index: index % 6 }));
    keyed(this.lines, named, (line) => line.name, () => s("path", { fill: "none" }), (path, line) => {
      put(path, "class", `line c${line.index}`);
      put(path, "d", `M${line.points.map(at).join("L")}`);
    });
    const latest = (line) => this.format(line.points.at(-1)[1]);
    keyed(this.keys, named, (line) => line.name, () => h("li", null, h("i"), h("span"), h("b")), (item, line) => {
      put(item.children[0], "class", `c${line.index}`);
      say(item.children[1], line.name === "all" ? "" : line.name);
      say(item.children[2], latest(line));
    });
    say(this.top, all.length ? `to ${this.format(most)}` : "");
    say(this.ago, all.length ? `${Math.round(spread)} s ago` : "nothing yet");
    put(this.svg, "aria-label", `${this.title}: ${named.map((line) => `${line.name} ${latest(line)}`).join(", ") || "nothing yet"}`);
  }
}

const level = (share) => HEIGHT - EDGE - share * (HEIGHT - 2 * EDGE);

/** The next 1, 2 or 5 times a power of ten. */
function round(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value * 0.9999) * power;
}
