//! What routing needs of a JSON body, found in one lazy pass without building a document.
//!
//! Values are skipped as bytes; nothing is checked but what is read, since the worker judges the body.
//! A body that is not a JSON object yields nothing.

use std::borrow::Cow;
use std::ops::Range;

use branchline_protocol::MAX_DEPTH;
use memchr::memchr2;

/// The few members of a body that matter here. Of a repeated key the last counts, as for JSON parsers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Peek<'a> {
    /// `model`, if it is a string.
    pub(super) model: Option<Cow<'a, str>>,
    /// Where the value of `model` stands in the body.
    pub(super) model_at: Range<usize>,
    /// `rid`, if it is a string.
    pub(super) rid: Option<Cow<'a, str>>,
    /// Whether there is a `rid` of another kind, such as a list.
    pub(super) has_rids: bool,
    /// `n`, if it is a number from 1 on; else 0.
    pub(super) choices: usize,
    /// The prompt as it stands in the body: the value of `prompt`, `messages`, `text`, `input_ids` or `input`.
    pub(super) text: &'a [u8],
    /// Values of `session_params`, `session_id`, `user` and `user_id`, in this order.
    pub(super) who: [&'a [u8]; 4],
    /// Why no worker may get the body.
    pub(super) fault: Option<Fault>,
}

/// What no client may send through us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// A member that tells workers where to connect.
    Peer(&'static str),
    /// Nesting that may exhaust a worker's parser.
    Deep,
}

/// Members by which the two halves of a disaggregated worker find each other.
const PEERS: [&str; 8] = [
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "kv_transfer_params",
    "disagg_prefill_dp_rank",
    "remote_host",
    "remote_port",
    "remote_bootstrap_addr",
];

impl Peek<'_> {
    /// What the body says the request belongs to: a session before a user.
    pub(super) fn session(&self) -> Option<String> {
        let [params, rest @ ..] = self.who;
        let inner = serde_json::from_slice::<serde_json::Value>(params).ok();
        let inner = inner.and_then(|params| Some(params.get("session_id")?.as_str()?.to_owned()));
        inner.or_else(|| rest.iter().find_map(|value| string(value).map(Cow::into_owned)))
    }
}

/// Looks through the top level of `body`.
pub(super) fn peek(body: &[u8]) -> Peek<'_> {
    let mut found = Peek::default();
    let mut cursor = Cursor { bytes: body, at: 0, deep: false };
    // A malformed rest leaves what was found before it.
    let _ = cursor.members(|key, value, at| match &*plain(key) {
        b"model" => {
            found.model = string(value);
            found.model_at = at..at + value.len();
        }
        b"rid" => {
            found.rid = string(value);
            found.has_rids = found.rid.is_none() && value != b"null";
        }
        b"n" => {
            found.choices = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok()).unwrap_or(0)
        }
        b"prompt" | b"messages" | b"text" | b"input_ids" | b"input" => found.text = value,
        b"session_params" => found.who[0] = value,
        b"session_id" => found.who[1] = value,
        b"user" => found.who[2] = value,
        b"user_id" => found.who[3] = value,
        key => {
            let peer = PEERS.into_iter().find(|name| name.as_bytes() == key && value != b"null");
            found.fault = found.fault.or(peer.map(Fault::Peer));
        }
    });
    if cursor.deep {
        found.fault = Some(Fault::Deep);
    }
    found
}

/// A key as JSON parsers read it.
fn plain(key: &[u8]) -> Cow<'_, [u8]> {
    if !key.contains(&b'\\') {
        return Cow::Borrowed(key);
    }
    let quoted = [b"\"", key, b"\""].concat();
    serde_json::from_slice::<String>(&quoted).map_or(Cow::Borrowed(key), |key| Cow::Owned(key.into_bytes()))
}

fn string(value: &[u8]) -> Option<Cow<'_, str>> {
    let inner = value.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    match inner.contains(&b'\\') {
        true => serde_json::from_slice::<String>(value).ok().map(Cow::Owned),
        false => std::str::from_utf8(inner).ok().map(Cow::Borrowed),
    }
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    /// A value was nested too deeply.
    deep: bool,
}

impl<'a> Cursor<'a> {
    /// Calls `visit` with each key (without quotes, escapes as they are), its value's bytes and their place.
    fn members(&mut self, mut visit: impl FnMut(&'a [u8], &'a [u8], usize)) -> Option<()> {
        self.expect(b'{')?;
        loop {
            self.blank();
            let start = self.at;
            self.string()?;
            let key = &self.bytes[start + 1..self.at - 1];
            self.expect(b':')?;
            self.blank();
            let start = self.at;
            self.value()?;
            visit(key, &self.bytes[start..self.at], start);
            self.expect(b',')?;
        }
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn blank(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\r' | b'\n')) {
            self.at += 1;
        }
    }

    fn expect(&mut self, byte: u8) -> Option<()> {
        self.blank();
        (self.peek()? == byte).then(|| self.at += 1)
    }

    /// Past a string's closing quote.
    fn string(&mut self) -> Option<()> {
        self.expect(b'"')?;
        loop {
            self.at += memchr2(b'"', b'\\', self.bytes.get(self.at..)?)?;
            match self.bytes[self.at] {
                b'"' => {
                    self.at += 1;
                    return Some(());
                }
                _ => self.at += 2,
            }
        }
    }

    /// Past a value of any kind. Depth is a count, so that no nesting can exhaust the stack.
    fn value(&mut self) -> Option<()> {
        let mut depth = 0usize;
        loop {
            match self.peek()? {
                b'"' => {
                    self.string()?;
                    if depth == 0 {
                        return Some(());
                    }
                }
                b'{' | b'[' => {
                    depth += 1;
                    if depth >= MAX_DEPTH {
                        self.deep = true;
                        return None;
                    }
                    self.at += 1;
                }
                b'}' | b']' if depth == 0 => return Some(()),
                b'}' | b']' => {
                    depth -= 1;
                    self.at += 1;
                    if depth == 0 {
                        return Some(());
                    }
                }
                b',' if depth == 0 => return Some(()),
                _ => self.at += 1,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    #[test]
    fn members_of_the_top_level_are_found_and_nested_ones_are_not() {
        let body = br#" { "messages" : [{"role":"user","content":"say \"model\": \\","model":"no"}], "model" : "a\u0062" , "rid":"r1" } "#;
        let found = peek(body);
        assert_eq!(found.model.as_deref(), Some("ab"));
        assert_eq!(found.rid.as_deref(), Some("r1"));
        assert_eq!(found.text, &br#"[{"role":"user","content":"say \"model\": \\","model":"no"}]"#[..]);
    }

    #[test]
    fn a_session_comes_before_a_user_and_a_prompt_names_neither() {
        let session = |body: &str| peek(body.as_bytes()).session();
        let all = r#"{"user":"u","session_id":"s","session_params":{"session_id":"p"}}"#;
        assert_eq!(session(all).as_deref(), Some("p"));
        assert_eq!(session(r#"{"user_id":"i","user":"u","session_id":"s"}"#).as_deref(), Some("s"));
        assert_eq!(session(r#"{"user_id":"i","session_params":{}}"#).as_deref(), Some("i"));
        assert_eq!(session(r#"{"prompt":""user":"x"","user":7,"messages":[{"user":"y"}]}"#), None);
    }

    #[test]
    fn the_last_of_a_repeated_key_counts() {
        assert_eq!(peek(br#"{"model":"a","model":"b"}"#).model.as_deref(), Some("b"));
        assert_eq!(peek(br#"{"model":"a","model":7}"#).model, None);
    }

    #[test]
    fn a_malformed_body_yields_what_stands_before_the_fault() {
        assert_eq!(peek(br#"{"model":"a","prompt":"x"#).model.as_deref(), Some("a"));
        for body in [&b""[..], b"[]", b"{", b"{\"", b"{\"a", b"{\"a\":", b"null", b"{\"model\":\"\\", b"{]}"]
        {
            assert_eq!(peek(body), Peek::default());
        }
    }

    #[test]
    fn deep_nesting_costs_no_stack() {
        let mut body = b"{\"x\":".to_vec();
        body.extend(std::iter::repeat_n(b'[', 1 << 20));
        assert_eq!(peek(&body), Peek { fault: Some(Fault::Deep), ..Peek::default() });
        let deepest =
            format!(r#"{{"x":{}{},"model":"m"}}"#, "[".repeat(MAX_DEPTH - 1), "]".repeat(MAX_DEPTH - 1));
        assert_eq!(
            (peek(deepest.as_bytes()).model.as_deref(), peek(deepest.as_bytes()).fault),
            (Some("m"), None)
        );
    }

    #[test]
    fn members_that_name_a_peer_are_found_however_they_are_spelt() {
        for name in PEERS {
            let body = format!(r#"{{"model":"m","{name}":0,"prompt":"x"}}"#);
            assert_eq!(peek(body.as_bytes()).fault, Some(Fault::Peer(name)));
        }
        let spelt = br#"{"boot\u0073trap_host":"10.0.0.1"}"#;
        assert_eq!(peek(spelt).fault, Some(Fault::Peer("bootstrap_host")));
        for good in
            [r#"{"bootstrap_host":null}"#, r#"{"prompt":"\"bootstrap_host\":1","x":{"bootstrap_host":1}}"#]
        {
            assert_eq!(peek(good.as_bytes()).fault, None, "{good}");
        }
    }

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            ".*".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::hash_map(".*", inner, 0..5).prop_map(Value::from_iter),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_object_yields_the_same_as_a_full_parse(model in ".*", prompt in values(), other in values(), pretty: bool) {
            let document = json!({"other": other, "prompt": prompt, "model": model, "last": other});
            let text = if pretty { serde_json::to_string_pretty(&document) } else { serde_json::to_string(&document) }.expect("a value");
            let found = peek(text.as_bytes());
            prop_assert_eq!(found.model.as_deref(), document["model"].as_str());
            let model: Value = serde_json::from_slice(&text.as_bytes()[found.model_at.clone()]).expect("a value");
            prop_assert_eq!(&model, &document["model"]);
            let text: Value = serde_json::from_slice(found.text).expect("a span of a value");
            prop_assert_eq!(&text, &document["prompt"]);
        }

        #[test]
        fn any_bytes_are_survived(body: Vec<u8>) {
            peek(&body);
        }
    }
}
