// A conversation as a tree of turns: what was said, and where it was forked. No elements, no calls.

/** Turns by id; `tip` is the turn that the next message follows, 0 the empty beginning. */
export class Conversation {
  #next = 1;

  constructor() {
    this.turns = new Map([[0, { id: 0, parent: null, role: "root", children: [] }]]);
    this.tip = 0;
  }

  /** Adds a turn after `parent` and makes it the tip. */
  add(role, content, parent = this.tip) {
    const turn = { id: this.#next++, parent, role, content, reasoning: "", children: [], state: "done", note: null };
    this.turns.set(turn.id, turn);
    this.turns.get(parent).children.push(turn.id);
    this.tip = turn.id;
    return turn;
  }

  /** Turns from the first to `id`, which is the tip if it is left out. */
  path(id = this.tip) {
    const turns = [];
    for (let turn = this.turns.get(id); turn.parent !== null; turn = this.turns.get(turn.parent)) turns.unshift(turn);
    return turns;
  }

  /** The ids that follow the same turn as `turn` does, itself among them. */
  siblings(turn) {
    return this.turns.get(turn.parent).children;
  }

  /** Shows the branch of `id`: the tip becomes the end of its latest continuation. */
  show(id) {
    let turn = this.turns.get(id);
    while (turn.children.length > 0) turn = this.turns.get(turn.children.at(-1));
    this.tip = turn.id;
  }

  /** Makes the next message follow `id`: a new branch, if something follows it already. */
  fork(id) {
    this.tip = id;
  }

  /** Messages for a request that shall follow `id`; `system` comes first if it says anything. */
  messages(system, id = this.tip) {
    const turns = this.path(id).map(({ role, content }) => ({ role, content }));
    return system.trim() ? [{ role: "system", content: system }, ...turns] : turns;
  }
}

/** Splits a text into `{code, text}` parts at its code fences; an open fence reaches to the end. */
export function parts(text) {
  return text
    .split(/^```[^\n]*\n?/m)
    .map((part, at) => ({ code: at % 2 === 1, text: part }))
    .filter((part) => part.text !== "");
}

/** Gives the sentences of a growing text one by one, for those who listen to it. */
export class Sentences {
  #said = 0;

  /** What can be said now of `text`, up to its last end of a sentence; all of it once it is `whole`. */
  next(text, whole) {
    const rest = text.slice(this.#said);
    const end = whole ? rest.length : Math.max(...[". ", "! ", "? ", "\n", "。"].map((mark) => rest.lastIndexOf(mark) + mark.length * (rest.includes(mark) ? 1 : 0)), 0);
    const found = rest.slice(0, end);
    this.#said += end;
    return found.trim();
  }
}
