// Calls of the gateway: the key, errors in words, and streams of events. Addresses are relative, so that a proxy may put the
// gateway below a path of its own.

const SLOT = "branchline-key";

/** The key of this tab; null without one. */
export const readKey = () => sessionStorage.getItem(SLOT);

/** Keeps the key for this tab, or forgets it. */
export function keepKey(value) {
  if (value) sessionStorage.setItem(SLOT, value);
  else sessionStorage.removeItem(SLOT);
}

/** A refused call: what the gateway said, and what to do about it. */
export class Fault extends Error {
  constructor(status, body, hint) {
    super(body?.message ?? `The gateway answered ${status}.`);
    this.status = status;
    this.code = body?.code;
    this.field = body?.param ?? body?.field ?? null;
    this.hint = hint ?? hintOf(status);
  }
}

function hintOf(status) {
  if (status === 401) return "Enter a key with the button at the top.";
  if (status === 403) return "This needs an administrator's key, or another address of the gateway.";
  if (status === 413) return "Send less.";
  if (status === 429) return "The gateway is full; try again in a moment.";
  if (status === 503) return "No worker can take it now; the fleet view says which are there.";
  return "";
}

const away = () => new Fault(0, { message: "The gateway does not answer." }, "Is it running, and is this the right address?");

function headersOf(extra) {
  const key = readKey();
  return { ...(key ? { authorization: `Bearer ${key}` } : {}), ...extra };
}

async function refused(response) {
  const text = await response.text().catch(() => "");
  let body = null;
  try {
    body = JSON.parse(text).error;
  } catch {
    body = text ? { message: text.slice(0, 500) } : null;
  }
  return new Fault(response.status, typeof body === "string" ? { message: body } : body);
}

async function send(path, { method = "GET", body, headers, signal } = {}) {
  let response;
  try {
    response = await fetch(path, { method, body, headers: headersOf(headers), signal, cache: "no-store" });
  } catch (error) {
    throw error.name === "AbortError" ? error : away();
  }
  if (!response.ok) throw await refused(response);
  return response;
}

/** JSON of a route. `json` is sent as the body; `body` as it is. */
export async function call(path, { json, headers, ...rest } = {}) {
  const response = await send(path, {
    ...rest,
    body: json === undefined ? rest.body : JSON.stringify(json),
    headers: json === undefined ? headers : { "content-type": "application/json", ...headers },
  });
  return response.json();
}

/** Text of a route. */
export const read = async (path, options) => (await send(path, options)).text();

/** Data of server-sent events in pieces of text as they come: whole events only, comments left out. */
export class EventReader {
  #rest = "";

  /** The data of the events that `text` completes. */
  feed(text) {
    const parts = (this.#rest + text).split(/\r?\n\r?\n/);
    this.#rest = parts.pop();
    return parts
      .map((part) =>
        part
          .split(/\r?\n/)
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).replace(/^ /, ""))
          .join("\n"),
      )
      .filter((data) => data !== "");
  }
}

/**
 * Posts `json` and gives the parsed data of the events, until `[DONE]`. `opened` gets the answer's headers. Throws a Fault for
 * an error event and for a stream that breaks off.
 */
export async function* stream(path, json, { headers, signal, opened } = {}) {
  const response = await send(path, {
    method: "POST",
    body: JSON.stringify(json),
    headers: { "content-type": "application/json", ...headers },
    signal,
  });
  opened?.(response.headers);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const events = new EventReader();
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : new Fault(0, { message: "The connection broke off." }, "Try again.");
    }
    if (piece.done) throw new Fault(0, { message: "The stream ended before the answer did." }, "Try again.");
    for (const data of events.feed(piece.value)) {
      if (data === "[DONE]") return;
      const value = JSON.parse(data);
      if (value.error) throw new Fault(value.error.status ?? 0, value.error);
      yield value;
    }
  }
}
