// Prometheus text and its history: rates, levels and quantiles over the last minutes. No elements, no calls.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

/** Samples by name: `{labels, value}` each. Comments and exemplars are left out. */
export function parse(text) {
  const families = new Map();
  for (const line of text.split("\n")) {
    if (line === "" || line.startsWith("#")) continue;
    const found = LINE.exec(line.split(" # ")[0]);
    if (!found) continue;
    const [, name, listed = "", value] = found;
    const labels = {};
    for (const [, label, raw] of listed.matchAll(LABEL)) labels[label] = raw.replace(/\\./g, (escape) => ESCAPES[escape] ?? escape);
    if (!families.has(name)) families.set(name, []);
    families.get(name).push({ labels, value: value === "+Inf" ? Infinity : Number(value) });
  }
  return families;
}

/** Sums a family's samples by one label, or all under "all"; `only(labels)` chooses among them. */
export function sums(families, name, by, only = () => true) {
  const totals = new Map();
  for (const { labels, value } of families.get(name) ?? []) {
    if (!only(labels)) continue;
    const key = by ? (typeof by === "function" ? by(labels) : labels[by]) : "all";
    totals.set(key, (totals.get(key) ?? 0) + value);
  }
  return totals;
}

/** The last pictures of /metrics, each with its time in seconds. */
export class History {
  constructor(kept = 150) {
    this.kept = kept;
    this.shots = [];
  }

  push(families, time) {
    this.shots.push({ families, time });
    if (this.shots.length > this.kept) this.shots.shift();
  }

  /** Lines of a gauge: `{name, points: [[time, value]]}` each. */
  level(metric, by, only) {
    return this.#lines((lines, { families, time }) => {
      for (const [key, value] of sums(families, metric, by, only)) add(lines, key, time, value);
    });
  }

  /** Lines of a counter's growth a second. A counter that starts again counts from zero. */
  rate(metric, by, only) {
    return this.#pairs((lines, before, after, seconds) => {
      const old = sums(before.families, metric, by, only);
      for (const [key, value] of sums(after.families, metric, by, only)) {
        const grown = value - (old.get(key) ?? 0);
        add(lines, key, after.time, (grown < 0 ? value : grown) / seconds);
      }
    });
  }

  /** Lines of a histogram's quantiles, over what came within `window` pictures. */
  quantiles(metric, shares, only, window = 15) {
    return this.#lines((lines, shot, at) => {
      const before = this.shots[Math.max(0, at - window)];
      const old = sums(before.families, `${metric}_bucket`, "le", only);
      const buckets = [...sums(shot.families, `${metric}_bucket`, "le", only)]
        .map(([bound, value]) => [bound === "+Inf" ? Infinity : Number(bound), Math.max(0, value - (before === shot ? 0 : (old.get(bound) ?? 0)))])
        .sort((a, b) => a[0] - b[0]);
      for (const share of shares) {
        const value = quantile(buckets, share);
        if (value !== null) add(lines, `p${Math.round(share * 100)}`, shot.time, value);
      }
    });
  }

  #lines(visit) {
    const lines = new Map();
    this.shots.forEach((shot, at) => visit(lines, shot, at));
    return [...lines.values()].sort((a, b) => a.name.localeCompare(b.name));
  }

  #pairs(visit) {
    return this.#lines((lines, after, at) => {
      const before = this.shots[at - 1];
      if (before && after.time > before.time) visit(lines, before, after, after.time - before.time);
    });
  }
}

function add(lines, name, time, value) {
  if (!Number.isFinite(value)) return;
  if (!lines.has(name)) lines.set(name, { name, points: [] });
  lines.get(name).points.push([time, value]);
}

/** The quantile of cumulative buckets `[bound, count]`, within a bucket by proportion; null without observations. */
export function quantile(buckets, share) {
  const all = buckets.at(-1)?.[1] ?? 0;
  if (all === 0) return null;
  const rank = share * all;
  let [low, below] = [0, 0];
  for (const [bound, upTo] of buckets) {
    if (upTo >= rank) return bound === Infinity ? low : low + ((bound - low) * (rank - below)) / Math.max(upTo - below, 1e-9);
    [low, below] = [bound, upTo];
  }
  return low;
}
