// The chat: sends turns, shows answers as they come, and forks the conversation at any turn.

import { Fault, call, stream } from "./api.js";
import { byId, count, h, keyed, plural, put, say, span, tell } from "./dom.js";
import { decision } from "./routing.js";
import * as sampling from "./sampling.js";
import { Conversation, Sentences, parts } from "./turns.js";

export const period = 3000;

let talk = new Conversation();
let running = null;
let models = [];

/** Binds the form and the keys. */
export function start() {
  sampling.build(byId("sampling"), () => loadModels(true));
  // On a phone the settings would hide the conversation.
  if (matchMedia("(max-width: 800px)").matches) byId("settings").open = false;
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else submit();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) submit();
  });
  byId("view-chat").addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  byId("new-chat").addEventListener("click", () => {
    running?.abort();
    talk = new Conversation();
    draw();
    tell(byId("chat-error"), null);
    byId("prompt").focus();
  });
  byId("fork-back").addEventListener("click", () => {
    talk.show(talk.tip);
    draw();
    byId("prompt").focus();
  });
  draw();
}

/** Looks for models until there are some. */
export async function poll() {
  if (models.length === 0) await loadModels(false);
}

/** Another key may open other models. */
export const rekeyed = () => loadModels(true);

async function loadModels(asked) {
  try {
    models = await sampling.loadModels();
    if (!running) tell(byId("chat-error"), models.length === 0 ? new Error("No worker serves a model yet.") : null);
  } catch (error) {
    models = [];
    if (asked || error instanceof Fault) tell(byId("chat-error"), error);
  }
}

function submit() {
  const text = byId("prompt").value;
  if (text.trim() === "") return;
  const fields = read();
  if (!fields) return;
  byId("prompt").value = "";
  talk.add("user", text);
  answer(fields);
}

/** The form's fields; null, and it is told, if they can't be read. */
function read() {
  try {
    const fields = sampling.fields();
    tell(byId("chat-error"), null);
    return fields;
  } catch (error) {
    tell(byId("chat-error"), error);
    sampling.mark(error.field);
    return null;
  }
}

/** Asks for the turn after the tip. */
async function answer(fields) {
  const messages = talk.messages(sampling.system());
  const turn = Object.assign(talk.add("assistant", ""), { state: "running", model: fields.model, begun: performance.now() });
  running = new AbortController();
  const sentences = new Sentences();
  say(byId("spoken"), "");
  draw(true);
  try {
    await fetchInto(turn, { ...fields, messages }, () => {
      drawSoon();
      speak(sentences.next(turn.content, false));
    });
    turn.state = "done";
  } catch (error) {
    turn.state = error.name === "AbortError" ? "stopped" : "failed";
    if (turn.state === "failed") {
      turn.note = { ...turn.note, error };
      tell(byId("chat-error"), error);
      sampling.mark(error.field?.split(/[.[]/)[0]);
    }
  }
  speak(sentences.next(turn.content, true) || `Answer ${turn.state}.`);
  running = null;
  draw();
}

function speak(text) {
  if (text) byId("spoken").append(h("span", null, `${text} `));
}

async function fetchInto(turn, body, grown) {
  const options = {
    headers: { "x-branchline-explain": "1" },
    signal: running.signal,
    opened: (headers) => note(turn, { decision: JSON.parse(headers.get("x-branchline-explain") ?? "null") }),
  };
  if (!body.stream) {
    const whole = await call("v1/chat/completions", { method: "POST", json: body, ...options });
    take(turn, whole.choices[0].message, whole);
    return;
  }
  for await (const chunk of stream("v1/chat/completions", body, options)) {
    take(turn, chunk.choices?.[0]?.delta, chunk);
    grown();
  }
}

function note(turn, what) {
  turn.note = { ...turn.note, ...what };
}

function take(turn, said, { usage, choices }) {
  if (said?.content || said?.reasoning_content) turn.first ??= performance.now();
  turn.content += said?.content ?? "";
  turn.reasoning += said?.reasoning_content ?? "";
  if (said?.tool_calls) note(turn, { tools: [...(turn.note?.tools ?? []), ...said.tool_calls] });
  if (choices?.[0]?.finish_reason) note(turn, { finish: choices[0].finish_reason });
  if (usage) note(turn, { usage, took: performance.now() - turn.begun });
}

let frame = 0;

/** Draws with the screen's next picture: pieces may come faster than that. */
function drawSoon() {
  frame ||= requestAnimationFrame(() => draw());
}

/** Draws the branch that ends at the tip, and follows its end if it was in view, or if it shall be. */
function draw(follow) {
  cancelAnimationFrame(frame);
  frame = 0;
  const box = byId("turns-box");
  const atEnd = follow || box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  const turns = talk.path();
  keyed(byId("turns"), turns, (turn) => turn.id, create, update);
  put(byId("view-chat"), "data-empty", turns.length === 0 ? "" : null);
  say(byId("send"), running ? "Stop" : "Send");
  const ahead = talk.turns.get(talk.tip).children;
  byId("fork-note").hidden = ahead.length === 0;
  if (atEnd) box.scrollTop = box.scrollHeight;
}

const button = (label, text, act) => h("button", { type: "button", class: "quiet small", "aria-label": label, on: { click: act } }, text);

function create(turn) {
  const mine = turn.role === "user";
  const body = h("div", { class: "body" });
  const way = h("span", { class: "way" });
  const foot = h("p", { class: "dim foot" });
  const why = h("details", { class: "why", hidden: true }, h("summary", null, "Why this worker"), h("div", { class: "why-body" }));
  const acts = h("span", { class: "acts" },
    button("Copy this turn", "Copy", () => navigator.clipboard?.writeText(turn.content)),
    mine ? button("Edit this message: a new branch", "Edit", () => edit(turn)) : button("Answer again: a new branch", "Again", () => again(turn)),
    mine ? null : button("Fork the conversation here", "Fork", () => fork(turn)));
  const head = h("div", { class: "turn-head" }, h("strong", { class: "who" }, mine ? "You" : turn.model), way, acts);
  return h("li", { class: `turn ${mine ? "mine" : "theirs"}` }, head, body, foot, why);
}

function update(element, turn) {
  const busy = turn.state === "running";
  put(element, "aria-busy", busy ? "true" : null);
  put(element, "data-state", turn.state);
  const text = `${turn.reasoning}\0${turn.content}\0${turn.note?.tools?.length}`;
  if (element.shownText !== text) {
    element.shownText = text;
    element.querySelector(".body").replaceChildren(...bodyOf(turn));
  }
  ways(element.querySelector(".way"), turn);
  for (const act of element.querySelectorAll(".acts button")) act.disabled = busy;
  say(element.querySelector(".foot"), footOf(turn));
  const made = turn.note?.decision;
  const why = element.querySelector(".why");
  if (made && why.hidden) {
    why.hidden = false;
    why.querySelector(".why-body").append(decision(made));
  }
}

function bodyOf(turn) {
  const shown = parts(turn.content).map((part) => (part.code ? h("pre", { class: "code", tabindex: 0 }, part.text) : h("p", null, part.text.trim())));
  const thought = turn.reasoning ? [h("details", { class: "thought" }, h("summary", null, "Reasoning"), h("p", null, turn.reasoning))] : [];
  const tools = turn.note?.tools ? [h("pre", { class: "code", tabindex: 0 }, JSON.stringify(turn.note.tools, null, 1))] : [];
  const waits = shown.length + tools.length === 0 && turn.state === "running" ? [h("p", { class: "dots", "aria-label": "waiting" }, "···")] : [];
  return [...thought, ...shown, ...tools, ...waits];
}

/** Where several branches begin, buttons to go from one to the next. */
function ways(place, turn) {
  const all = talk.siblings(turn);
  const text = `${all.indexOf(turn.id)}/${all.length}/${running !== null}`;
  if (place.dataset.text === text) return;
  place.dataset.text = text;
  if (all.length < 2) return place.replaceChildren();
  const at = all.indexOf(turn.id);
  const go = (step, label, sign) => {
    const control = button(label, sign, () => {
      talk.show(all[at + step]);
      draw();
      byId("turns").querySelector(`[data-key="${all[at + step]}"] .way button:not(:disabled)`)?.focus();
    });
    control.disabled = !all[at + step] || running !== null;
    return control;
  };
  place.replaceChildren(go(-1, "Branch before", "‹"), h("span", null, `branch ${at + 1} of ${all.length}`), go(1, "Next branch", "›"));
}

function footOf(turn) {
  const { usage, finish, took, decision: made, error } = turn.note ?? {};
  const words = [];
  if (turn.state === "stopped") words.push("stopped");
  if (error) words.push(`failed: ${error.message}`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    words.push(plural(usage.completion_tokens, "token"), `${count(cached)} of ${plural(usage.prompt_tokens, "prompt token")} cached`);
    const wait = turn.first - turn.begun;
    if (Number.isFinite(wait) && took > wait) {
      words.push(`first after ${span(wait)}`);
      if (usage.completion_tokens > 1) words.push(`${((usage.completion_tokens - 1) / ((took - wait) / 1000)).toFixed(0)} tokens/s`);
    }
  }
  if (finish && finish !== "stop") words.push(`ended by ${finish}`);
  if (made) words.push(`on ${made.chosen}`);
  return words.join(" · ");
}

function fork(turn) {
  talk.fork(turn.id);
  draw();
  byId("prompt").focus();
}

function edit(turn) {
  if (running) return;
  talk.fork(turn.parent);
  byId("prompt").value = turn.content;
  draw();
  byId("prompt").focus();
}

function again(turn) {
  const fields = running ? null : read();
  if (!fields) return;
  talk.fork(turn.parent);
  answer(fields);
}
