// Where the nodes of a radix tree stand in the picture: like a railway map. Numbers only, no elements.
//
// A node is a piece of line. Its length says how many tokens it holds (by logarithm, for a prompt of 10 000 tokens and one
// of 16 shall both be seen), its thickness how often it was used. The first child goes on straight, the others branch off below.

const ROW = 34;
const GAP = 26;
const LEFT = 18;
const SHORTEST = 34;

/** Length of a node's line in pixels. */
export const lengthOf = (tokens) => SHORTEST + 24 * Math.log2(1 + tokens / 16);

/** Thickness of its line in pixels, 5 to 16. */
export const thicknessOf = (hits) => Math.min(16, 5 + 2 * Math.log2(1 + hits));

/** How hot a node is by the time since its last use: 4 within ten seconds, down to 0 after an hour. */
export function heatOf(ageMs) {
  const bounds = [10_000, 60_000, 600_000, 3_600_000];
  const at = bounds.findIndex((bound) => ageMs < bound);
  return at === -1 ? 0 : 4 - at;
}

/**
 * Places nodes. Gives them in reading order (a parent, then each child with all below it), each with `x`, `y`, `width`, `level`
 * (1 for a root), `place` and `among` (its place among its siblings, from 1), and the whole's `width` and `height`. A node
 * whose parent is not in the list stands as a root.
 */
export function layout(nodes) {
  const known = new Map(nodes.map((node) => [node.node, node]));
  const below = new Map();
  for (const node of nodes) {
    const parent = known.has(node.parent) ? node.parent : null;
    if (!below.has(parent)) below.set(parent, []);
    below.get(parent).push(node);
  }
  // The most used goes on straight; ties are kept in the order of their numbers, so that the picture does not jump.
  for (const list of below.values()) list.sort((a, b) => b.hits - a.hits || a.node - b.node);
  const placed = [];
  let row = 0;
  // No recursion: a tree may be as deep as a prompt has pages.
  const stack = frames(below.get(null) ?? [], null);
  while (stack.length > 0) {
    const { node, parent, place, among } = stack.pop();
    // A first child stands in its parent's row, all others in a new one.
    if (place > 1 || parent === null) row += 1;
    const width = lengthOf(node.tokens);
    const x = parent ? parent.x + parent.width + GAP : LEFT;
    const spot = { node, x, y: row * ROW, width, level: parent ? parent.level + 1 : 1, place, among, parent };
    placed.push(spot);
    stack.push(...frames(below.get(node.node) ?? [], spot));
  }
  const right = placed.reduce((most, spot) => Math.max(most, spot.x + spot.width), 0);
  return { spots: placed, width: right + LEFT + 60, height: (row + 1) * ROW };
}

/** Siblings as entries for the stack: the last one first, for the first to be taken first. */
function frames(list, parent) {
  return list.map((node, at) => ({ node, parent, place: at + 1, among: list.length })).reverse();
}
