// Elements, numbers in words, and dialogs. Knows no route of the gateway.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element: attributes (with `on` for listeners), then children, texts or lists of them. */
export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** The same in SVG. */
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export const byId = (id) => document.getElementById(id);

/** Sets a text only if it differs, so that readers and selections are left alone. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Sets an attribute only if it differs; null takes it away. */
export function put(element, name, value) {
  if (value === null || value === undefined) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

/**
 * Makes the children of `container` those of `items`, in order. What is there already is updated in place, so that focus and
 * open parts stay. `create(item)` gives an element, `update(element, item)` fills it.
 */
export function keyed(container, items, keyOf, create, update) {
  const known = new Map([...container.children].map((child) => [child.dataset.key, child]));
  const keys = new Set(items.map((item) => String(keyOf(item))));
  // First what is gone: what stays would have to be moved past it, and loses its focus by that.
  for (const [key, child] of known) if (!keys.has(key)) child.remove();
  let at = container.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    const element = known.get(key) ?? create(item);
    element.dataset.key = key;
    if (element === at) at = at.nextElementSibling;
    else container.insertBefore(element, at);
    update(element, item);
  }
}

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (number) => (number === null || number === undefined ? "–" : whole.format(number));
export const compact = (number) => (number === null || number === undefined ? "–" : short.format(number));
export const percent = (share) => (Number.isFinite(share) ? `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %` : "–");
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

/** Milliseconds as people say them. */
export function span(ms) {
  if (!Number.isFinite(ms)) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 1 : 0)} s`;
  if (ms < 3_600_000) return `${Math.floor(ms / 60_000)} min`;
  if (ms < 86_400_000) return `${Math.floor(ms / 3_600_000)} h`;
  return `${Math.floor(ms / 86_400_000)} d`;
}

/** JSON of a text field. Throws an Error whose message says where it stops being JSON. */
export function readJson(text, what) {
  if (text.trim() === "") return {};
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`${what}: this is not JSON (${error.message})`);
  }
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new Error(`${what}: give a JSON object, as in {"name": 1}`);
  }
  return value;
}

/** Shows what went wrong in `place`, or clears it. A Fault brings a hint of what to do. */
export function tell(place, error) {
  if (!error) {
    if (place.firstChild) place.replaceChildren();
    return;
  }
  const text = [error.message, error.hint].filter(Boolean).join(" ");
  if (place.textContent === text) return;
  place.replaceChildren(h("p", { class: "notice bad" }, h("strong", null, error.message), error.hint ? ` ${error.hint}` : ""));
}

/** The faults of a view: that of the last action stays until the next one, that of a poll until the next poll. */
export class Faults {
  #acted = null;
  #polled = null;

  constructor(place) {
    this.place = place;
  }

  acted(error) {
    this.#acted = error;
    tell(this.place, this.#acted ?? this.#polled);
  }

  polled(error) {
    this.#polled = error;
    tell(this.place, this.#acted ?? this.#polled);
  }
}

/** Asks before something that can't be taken back. Resolves to true or false; focus returns to where it was. */
export function ask(title, text, yes) {
  const dialog = byId("ask-dialog");
  say(byId("ask-title"), title);
  say(byId("ask-text"), text);
  say(byId("ask-yes"), yes);
  dialog.showModal();
  byId("ask-no").focus();
  return new Promise((resolve) => {
    let agreed = false;
    byId("ask-yes").onclick = () => {
      agreed = true;
      dialog.close();
    };
    byId("ask-no").onclick = () => dialog.close();
    dialog.onclose = () => resolve(agreed);
  });
}

/** A labelled value. */
export const fact = (label, value) => h("div", { class: "fact" }, h("dt", null, label), h("dd", null, value));

/** A labelled control: `control` gets the id that the label is for. */
export function field(id, label, control, help) {
  control.id = id;
  const note = help ? h("span", { class: "dim help", id: `${id}-help` }, help) : null;
  if (note) control.setAttribute("aria-describedby", note.id);
  return h("div", { class: "field" }, h("label", { for: id }, label), control, note);
}
