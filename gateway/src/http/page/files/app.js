// Starts the page: which view is shown, what the caller may do, and the dialog for the key.

import { call, keepKey, readKey } from "./api.js";
import { byId, say } from "./dom.js";
import * as chat from "./chat.js";
import * as fleet from "./fleet.js";
import * as metrics from "./metrics.js";
import * as modules from "./modules.js";
import * as routing from "./routing.js";
import * as tree from "./tree.js";

/** Each has `start(context)`, called once, and may have `poll()`, called while it is in view, every `period` ms. */
const VIEWS = { chat, fleet, tree, routing, modules, metrics };

/** What the views share. `about` is what the gateway says of the caller, null while it is away. */
const context = { about: null, refresh };
let shown = null;
let timer = 0;
let round = 0;

const operators = (name) => name !== "chat";

/** Why a view can't show anything here; null if it can. */
function barred(name) {
  const { about } = context;
  if (!about) return null;
  if (!operators(name)) {
    return about.clients ? null : "This is the operators' port; the chat is on the gateway's public port.";
  }
  if (!about.operators) {
    return "Operators are served on a port of their own (--admin-port). Open this page there: what this view shows can't be reached on the public port.";
  }
  if (about.may_read) return null;
  if (about.key === "client") return "Your key may send requests; this view needs an administrator's key.";
  if (about.key === "unknown") return "The gateway does not know this key. Enter an administrator's key to see this view.";
  return about.keyed
    ? "Enter an administrator's key to see this view."
    : "This address is not a name of the gateway; open it by its IP address, as localhost, or by the --host it was given.";
}

function access() {
  const { about } = context;
  if (!about) return ["away", "bad"];
  if (about.key === "unknown") return ["unknown key", "bad"];
  if (about.may_operate) return ["operator", "good"];
  if (about.may_read) return ["read-only", "warm"];
  if (about.keyed && about.key === "none") return ["no key", "warm"];
  return ["chat only", "warm"];
}

function showAccess() {
  const [word, tone] = access();
  say(byId("access"), word);
  byId("access").className = `chip ${tone}`;
  const text = shown ? barred(shown) : null;
  const readOnly = !text && shown && operators(shown) && context.about && !context.about.may_operate;
  const note = readOnly ? "Read-only: an administrator's key allows changes." : "";
  say(byId("banner"), text ?? note);
  byId("banner").hidden = !(text || note);
  document.body.classList.toggle("read-only", !context.about?.may_operate);
  for (const name of Object.keys(VIEWS)) byId(`view-${name}`).classList.toggle("barred", barred(name) !== null);
}

async function refresh() {
  try {
    context.about = await call("page/about");
  } catch {
    context.about = null;
  }
  showAccess();
  for (const view of Object.values(VIEWS)) view.allow?.(context.about?.may_operate ?? false);
}

async function tick() {
  const mine = ++round;
  clearTimeout(timer);
  const view = VIEWS[shown];
  if (!context.about) await refresh();
  if (view?.poll && context.about && !document.hidden && barred(shown) === null) await view.poll();
  // A later call, after a change of view, has taken over meanwhile.
  if (mine === round) timer = setTimeout(tick, view?.period ?? 3000);
}

function navigate(move) {
  const wanted = location.hash.slice(1);
  if (wanted === "main") return;
  const name = wanted in VIEWS ? wanted : "chat";
  if (name === shown) return;
  shown = name;
  for (const other of Object.keys(VIEWS)) byId(`view-${other}`).hidden = other !== name;
  for (const link of byId("nav").children) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${byId(`h-${name}`).textContent} · Branchline`;
  showAccess();
  if (move) byId(`h-${name}`).focus({ preventScroll: true });
  VIEWS[name].shown?.();
  tick();
}

function bindKey() {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  byId("key-button").addEventListener("click", () => {
    input.value = readKey() ?? "";
    say(byId("key-said"), "");
    dialog.showModal();
    input.focus();
  });
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-forget").addEventListener("click", () => use(null));
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    use(input.value.trim());
  });
  async function use(value) {
    if (/[^!-~]/.test(value ?? "")) {
      say(byId("key-said"), "A key has no blanks and no letters beyond ASCII.");
      input.setAttribute("aria-invalid", "true");
      return;
    }
    keepKey(value);
    await refresh();
    if (value && context.about?.key === "unknown") {
      say(byId("key-said"), "The gateway does not know this key.");
      input.setAttribute("aria-invalid", "true");
      return;
    }
    input.removeAttribute("aria-invalid");
    dialog.close();
    for (const view of Object.values(VIEWS)) view.rekeyed?.();
    tick();
  }
}

byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
addEventListener("hashchange", () => navigate(true));
document.addEventListener("visibilitychange", () => document.hidden || tick());
bindKey();
for (const view of Object.values(VIEWS)) view.start(context);
await refresh();
navigate(false);
