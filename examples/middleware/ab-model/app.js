// Sends a share of the users of one model to another. Config: {"from": "a", "to": "b", "percent": 10}.
// A user (header x-user, else the tenant) always gets the same of the two.
import { config } from "branchline:middleware/host@1.0.0";

export const about = {
  describe() {
    return { requestBody: true, responseBody: false };
  },
};

function bucket(text) {
  let hash = 2166136261;
  for (let i = 0; i < text.length; i++) hash = Math.imul(hash ^ text.charCodeAt(i), 16777619) >>> 0;
  return hash % 100;
}

export const onRequest = {
  handle(request) {
    const { from, to, percent } = JSON.parse(config() || "{}");
    if (!from || request.model !== from) return { tag: "continue" };
    const user = request.headers.find((header) => header.name === "x-user");
    if (bucket(user ? user.value : request.tenant || "") >= percent) return { tag: "continue" };
    // The name is replaced byte by byte, so that the rest of the body stays as it came.
    const old = `"${from}"`;
    let text = "";
    for (const byte of request.body) text += String.fromCharCode(byte);
    const at = text.indexOf(old, text.indexOf('"model"'));
    if (at < 0) return { tag: "continue" };
    const changed = text.slice(0, at) + `"${to}"` + text.slice(at + old.length);
    const body = new Uint8Array(changed.length);
    for (let i = 0; i < changed.length; i++) body[i] = changed.charCodeAt(i);
    const headers = { set: [{ name: "x-variant", value: "b" }], add: [], remove: [] };
    return { tag: "modify", val: { headers, body } };
  },
};
