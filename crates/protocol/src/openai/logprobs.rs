//! Logprobs in the two OpenAI forms: a list of tokens (chat) and columns (completions).
//!
//! Two tokens may print the same text; lists keep both, and the map of the completions form gives each its own key.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::logprobs::{Position, Spelling};

/// What is sent for a logprob of minus infinity, which JSON can't say.
const LEAST: f32 = -9999.0;

/// The chat form.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ChatLogprobs {
    /// One entry a token.
    pub content: Vec<TokenLogprob>,
}

/// One token of the chat form.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenLogprob {
    /// Text; bytes that are no UTF-8 are U+FFFD.
    pub token: String,
    /// Natural logarithm.
    pub logprob: f32,
    /// The token's bytes.
    pub bytes: Vec<u8>,
    /// Alternatives, in falling order; absent within one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_logprobs: Option<Vec<TokenLogprob>>,
}

impl ChatLogprobs {
    /// Spells positions.
    pub fn new(positions: &[Position], spelling: &impl Spelling) -> Self {
        let content = positions
            .iter()
            .map(|position| TokenLogprob {
                top_logprobs: Some(
                    position.top.iter().map(|&(id, logprob)| token(id, logprob, spelling)).collect(),
                ),
                ..token(position.id, position.logprob.unwrap_or(LEAST), spelling)
            })
            .collect();
        Self { content }
    }
}

fn token(id: u32, logprob: f32, spelling: &impl Spelling) -> TokenLogprob {
    TokenLogprob {
        token: spelling.text(id),
        logprob: finite(logprob),
        bytes: spelling.bytes(id),
        top_logprobs: None,
    }
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { LEAST }
}

/// The completions form: columns of equal length.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct CompletionLogprobs {
    /// Texts.
    pub tokens: Vec<String>,
    /// Logprobs; null for the first token of an echoed prompt.
    pub token_logprobs: Vec<Option<f32>>,
    /// Alternatives by text, with the token itself, so up to one more than asked for; null where none were asked
    /// for or exist.
    pub top_logprobs: Option<Vec<Option<Map<String, Value>>>>,
    /// Characters of the text before each token.
    pub text_offset: Vec<usize>,
}

/// Where tokens begin in a text, in characters; a token that begins within a character has that character's place.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Offsets {
    /// Characters completed.
    characters: usize,
    /// Bytes of a character that has begun, at most 3.
    begun: Vec<u8>,
}

impl Offsets {
    /// The place of a token of these bytes, which come next; bytes that are no UTF-8 count as U+FFFD.
    fn place(&mut self, bytes: &[u8]) -> usize {
        let goes_on = bytes.first().is_none_or(|byte| matches!(byte, 0x80..=0xbf));
        if !goes_on && !self.begun.is_empty() {
            // The character that has begun ends here, cut off.
            self.begun.clear();
            self.characters += 1;
        }
        let place = self.characters;
        self.begun.extend_from_slice(bytes);
        loop {
            let (whole, wrong) = match std::str::from_utf8(&self.begun) {
                Ok(text) => (text.len(), None),
                Err(error) => (error.valid_up_to(), error.error_len()),
            };
            self.characters += String::from_utf8_lossy(&self.begun[..whole]).chars().count();
            self.begun.drain(..whole + wrong.unwrap_or(0));
            if wrong.is_none() {
                return place;
            }
            self.characters += 1;
        }
    }
}

impl CompletionLogprobs {
    /// Spells positions; `offsets` has had the text before the first and is moved on.
    pub fn new(positions: &[Position], top: u32, offsets: &mut Offsets, spelling: &impl Spelling) -> Self {
        let mut out = Self { top_logprobs: (top > 0).then(Vec::new), ..Self::default() };
        for position in positions {
            let text = name(position.id, spelling);
            let shown = if spelling.shows(position.id) { spelling.bytes(position.id) } else { Vec::new() };
            out.text_offset.push(offsets.place(&shown));
            out.tokens.push(text);
            out.token_logprobs.push(position.logprob.map(finite));
            if let Some(column) = &mut out.top_logprobs {
                column.push(position.logprob.is_some().then(|| alternatives(position, spelling)));
            }
        }
        out
    }

    /// Puts `later` behind.
    pub fn append(&mut self, mut later: Self) {
        self.tokens.append(&mut later.tokens);
        self.token_logprobs.append(&mut later.token_logprobs);
        self.text_offset.append(&mut later.text_offset);
        if let (Some(column), Some(mut more)) = (&mut self.top_logprobs, later.top_logprobs) {
            column.append(&mut more);
        }
    }
}

fn alternatives(position: &Position, spelling: &impl Spelling) -> Map<String, Value> {
    let mut map = Map::new();
    let own = position.logprob.map(|logprob| (position.id, logprob));
    let own = own.filter(|&(id, _)| position.top.iter().all(|&(other, _)| other != id));
    for (id, logprob) in position.top.iter().copied().chain(own) {
        let mut key = name(id, spelling);
        if map.contains_key(&key) {
            key = format!("token_id:{id}");
        }
        map.insert(key, shortest(finite(logprob)));
    }
    map
}

/// A token's text, or its bytes where they are no UTF-8 by themselves: the same name in every column.
fn name(id: u32, spelling: &impl Spelling) -> String {
    let bytes = spelling.bytes(id);
    if std::str::from_utf8(&bytes).is_ok() {
        return spelling.text(id);
    }
    bytes.iter().fold("bytes:".to_owned(), |key, byte| key + &format!("\\x{byte:02x}"))
}

/// A 32-bit number with the digits that tell it from its neighbours, not those of its 64-bit equal.
fn shortest(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or_else(|_| Value::from(number), Value::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    struct Bytes;

    impl Spelling for Bytes {
        fn text(&self, id: u32) -> String {
            String::from_utf8_lossy(&self.bytes(id)).into_owned()
        }
        fn bytes(&self, id: u32) -> Vec<u8> {
            match id {
                183 => vec![0xec],
                220 => vec![0x82],
                81 | 82 => vec![0x61],
                // A token for each byte, as in byte-level vocabularies, and a special one.
                1000..=1255 => vec![(id - 1000) as u8],
                2000 => "<end>".into(),
                _ => "é".into(),
            }
        }
        fn shows(&self, id: u32) -> bool {
            id != 2000
        }
    }

    fn position() -> Position {
        Position {
            id: 183,
            logprob: Some(-0.1),
            top: vec![(183, -0.1), (220, -1.5), (81, -2.0), (82, -3.0)],
            chosen: Vec::new(),
        }
    }

    #[test]
    fn logprobs_top_same_text_stays_apart_and_in_order() {
        let answer = serde_json::to_value(ChatLogprobs::new(&[position()], &Bytes)).unwrap();
        let top = answer["content"][0]["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 4);
        assert_eq!(
            top.iter().map(|t| t["bytes"].clone()).take(3).collect::<Vec<_>>(),
            [json!([236]), json!([130]), json!([97])]
        );
        assert_eq!(top[0]["token"], top[1]["token"]);
        assert!((top[1]["logprob"].as_f64().unwrap() + 1.5).abs() < 1e-6);
        assert!(top[0].get("top_logprobs").is_none());
    }

    #[test]
    fn the_completions_form_gives_equal_texts_their_own_keys() {
        let form = CompletionLogprobs::new(&[position()], 4, &mut Offsets::default(), &Bytes);
        let map = form.top_logprobs.unwrap()[0].clone().unwrap();
        let keys: Vec<&str> = map.keys().map(String::as_str).collect();
        assert_eq!(keys, ["bytes:\\xec", "bytes:\\x82", "a", "token_id:82"]);
    }

    #[test]
    fn offsets_count_characters_and_go_on_over_chunks() {
        let mut offset = Offsets::default();
        let at = |id, logprob| Position { id, logprob, ..Position::default() };
        let mut form = CompletionLogprobs::new(&[at(5, None), at(81, Some(-1.0))], 0, &mut offset, &Bytes);
        form.append(CompletionLogprobs::new(&[at(81, Some(f32::NEG_INFINITY))], 0, &mut offset, &Bytes));
        assert_eq!(form.text_offset, [0, 1, 2]);
        assert_eq!(form.token_logprobs, [None, Some(-1.0), Some(-9999.0)]);
        assert_eq!(form.top_logprobs, None);
    }
    #[test]
    fn the_map_holds_the_token_itself_also_when_it_is_not_among_the_likeliest() {
        let unlikely = Position { top: vec![(220, -0.2), (81, -2.0)], ..position() };
        let form = CompletionLogprobs::new(&[unlikely, position()], 2, &mut Offsets::default(), &Bytes);
        let maps: Vec<_> = form.top_logprobs.unwrap().into_iter().flatten().collect();
        let keys: Vec<&str> = maps[0].keys().map(String::as_str).collect();
        assert_eq!(keys, ["bytes:\\x82", "a", "bytes:\\xec"]);
        assert!((maps[0]["bytes:\\xec"].as_f64().unwrap() + 0.1).abs() < 1e-6);
        assert_eq!(maps[1].len(), 4, "a token among the likeliest is not listed twice");
    }

    #[test]
    fn a_token_within_a_character_has_the_characters_place() {
        let places = |bytes: &[u8], cut: usize| {
            let at = |byte: &u8| Position { id: 1000 + u32::from(*byte), ..Position::default() };
            let positions: Vec<_> = bytes.iter().map(at).collect();
            let mut offsets = Offsets::default();
            let mut form = CompletionLogprobs::new(&positions[..cut], 0, &mut offsets, &Bytes);
            form.append(CompletionLogprobs::new(&positions[cut..], 0, &mut offsets, &Bytes));
            form.text_offset
        };
        let text = "你好🦜 é";
        let expected: Vec<usize> =
            text.chars().enumerate().flat_map(|(place, c)| vec![place; c.len_utf8()]).collect();
        assert_eq!(expected, [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 4, 4]);
        for cut in 0..text.len() {
            assert_eq!(places(text.as_bytes(), cut), expected, "chunks of {cut} and the rest");
        }
        // Lossy text: one U+FFFD for the cut-off parrot, one for the stray byte.
        assert_eq!(places(b"\xf0\x9f\xa6a\x82b", 2), [0, 0, 0, 1, 2, 3]);
    }

    #[test]
    fn a_token_that_the_text_leaves_out_takes_no_place() {
        let at = |id| Position { id, ..Position::default() };
        let form = CompletionLogprobs::new(&[at(81), at(2000), at(81)], 0, &mut Offsets::default(), &Bytes);
        assert_eq!(form.text_offset, [0, 1, 1]);
        assert_eq!(form.tokens[1], "<end>");
    }
}
