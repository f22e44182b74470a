// Marks requests whose prompt looks like an attempt to override its instructions: x-prompt-risk: high.
// Config: {"phrases": ["…"]} adds to the list.
import { config } from "branchline:middleware/host@1.0.0";

const PHRASES = ["ignore all previous instructions", "ignore previous instructions", "disregard your instructions"];

// Bytes to text without a decoder, which this engine has not; only ASCII is compared.
function ascii(bytes) {
  let text = "";
  for (let i = 0; i < bytes.length; i++) text += String.fromCharCode(bytes[i] < 128 ? bytes[i] : 63);
  return text.toLowerCase();
}

export const about = {
  describe() {
    return { requestBody: true, responseBody: false };
  },
};

export const onRequest = {
  handle(request) {
    const own = JSON.parse(config() || "{}").phrases || [];
    const text = ascii(request.body || new Uint8Array());
    const found = PHRASES.concat(own).some((phrase) => text.includes(phrase.toLowerCase()));
    if (!found) return { tag: "continue" };
    const headers = { set: [{ name: "x-prompt-risk", value: "high" }], add: [], remove: [] };
    return { tag: "modify", val: { headers } };
  },
};
