//! How much of a text one token can stand for, which bounds from below the tokens of a text of known length.
//!
//! Only for tokenizers that drop nothing: where the file says something not known here, there is no bound.

use serde_json::Value;

use crate::vocabulary::Vocabulary;

/// Normalising makes text at most this many times shorter: composed characters and the replacements of `▁` take
/// at least a third of the bytes they are made from.
const SHRINK: usize = 4;

/// What bounds the tokens of a text.
pub(crate) struct Reach {
    /// Most bytes of a text that become one token, not counting those that become none.
    longest: usize,
    /// Bytes that become none, because the vocabulary lacks them.
    lost: Option<[bool; 256]>,
}

impl Reach {
    /// Reads a tokenizer.json; none if there is no bound.
    pub(crate) fn of(file: &Value, vocabulary: &Vocabulary) -> Option<Self> {
        let (model, pieces, normalizer) = (&file["model"], &file["pre_tokenizer"], &file["normalizer"]);
        let strips = |token: &Value| token["lstrip"] == true || token["rstrip"] == true;
        let lost = vocabulary.missing_bytes();
        let complete = !lost.contains(&true);
        let plain = normalizer.is_null() && !any(pieces, "Metaspace") && any(pieces, "ByteLevel");
        let covered = plain || complete && (model["byte_fallback"] == true || any(pieces, "ByteLevel"));
        let keeps = model["type"] == "BPE"
            && covered
            && all(pieces, &keeps_pieces)
            && all(normalizer, &keeps_length)
            && !file["added_tokens"].as_array().into_iter().flatten().any(strips);
        let longest = vocabulary.longest().max(1) * if plain { 1 } else { SHRINK };
        // With a token for what is unknown, any number of lost bytes may become one: still not more than none.
        keeps.then(|| Self { longest, lost: (!complete).then_some(lost) })
    }

    /// Tokens that a text has at least.
    pub(crate) fn at_least(&self, text: &str) -> usize {
        let lost = self.lost.map_or(0, |lost| text.bytes().filter(|&byte| lost[usize::from(byte)]).count());
        (text.len() - lost).div_ceil(self.longest)
    }
}

/// The parts of a sequence, or the one part, or none.
fn parts(part: &Value) -> Vec<&Value> {
    let inner = part["normalizers"].as_array().or_else(|| part["pretokenizers"].as_array());
    match (part, inner) {
        (Value::Null, _) => Vec::new(),
        (_, Some(inner)) if part["type"] == "Sequence" => inner.iter().flat_map(parts).collect(),
        _ => vec![part],
    }
}

fn any(part: &Value, kind: &str) -> bool {
    parts(part).iter().any(|part| part["type"] == kind)
}

fn all(part: &Value, holds: &dyn Fn(&Value) -> bool) -> bool {
    parts(part).into_iter().all(holds)
}

fn keeps_pieces(part: &Value) -> bool {
    match part["type"].as_str() {
        Some("ByteLevel" | "Metaspace" | "Digits") => true,
        Some("Split" | "Punctuation") => part["behavior"].as_str().is_some_and(|how| how != "Removed"),
        _ => false,
    }
}

fn keeps_length(part: &Value) -> bool {
    match part["type"].as_str() {
        Some("NFC" | "NFD" | "Prepend") => true,
        Some("Replace") => match (part["pattern"]["String"].as_str(), part["content"].as_str()) {
            (Some(from), Some(to)) => from.len() <= to.len(),
            _ => false,
        },
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use crate::Tokenizer;
    use crate::fixtures::{byte_level, sentence_piece};

    fn load(file: &serde_json::Value) -> Tokenizer {
        Tokenizer::from_json(file.to_string().as_bytes()).unwrap()
    }

    /// As vocabularies that were trained without some bytes: text of them has no tokens.
    fn incomplete() -> serde_json::Value {
        let mut file = byte_level();
        let vocabulary = file["model"]["vocab"].as_object_mut().unwrap();
        assert!(vocabulary.remove(&crate::fixtures::letter(4).to_string()).is_some());
        file
    }

    #[test]
    fn bytes_that_the_vocabulary_lacks_do_not_count() {
        let tokenizer = load(&incomplete());
        assert_eq!(tokenizer.encode(&"\u{4}".repeat(100), false), Ok(Vec::new()));
        assert_eq!(tokenizer.at_least(&"\u{4}".repeat(100)), 0);
        assert_eq!(tokenizer.at_least(&"x\u{4}".repeat(130)), 10);
    }

    fn composing() -> serde_json::Value {
        let mut file = byte_level();
        file["normalizer"] = json!({"type": "NFC"});
        file
    }

    #[test]
    fn the_longest_token_gives_the_bound() {
        let tokenizer = load(&byte_level());
        assert_eq!(tokenizer.vocabulary().longest(), "<|endoftext|>".len());
        assert_eq!(
            [0, 1, 13, 14, 1300].map(|bytes| tokenizer.at_least(&"x".repeat(bytes))),
            [0, 1, 1, 2, 100]
        );
        assert_eq!(tokenizer.encode(&"<|endoftext|>".repeat(100), false).unwrap().len(), 100);
    }

    #[test]
    fn a_tokenizer_that_may_drop_text_has_no_bound() {
        let mut stripping = byte_level();
        stripping["added_tokens"][1]["rstrip"] = json!(true);
        let mut trimmed = byte_level();
        trimmed["normalizer"] = json!({"type": "Sequence", "normalizers": [
            {"type": "Strip", "strip_left": true, "strip_right": true}]});
        let mut shortened = byte_level();
        shortened["normalizer"] = json!({"type": "Replace", "pattern": {"String": "   "}, "content": ""});
        let mut split = byte_level();
        split["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]});
        let mut unknown = sentence_piece();
        unknown["model"]["byte_fallback"] = json!(false);
        for file in [stripping, trimmed, shortened, split, unknown] {
            assert_eq!(load(&file).at_least(&"x".repeat(1 << 16)), 0, "{}", file["normalizer"]);
        }
    }

    proptest! {
        #[test]
        fn no_text_has_fewer_tokens_than_the_bound_says(
            pieces in proptest::collection::vec(
                proptest::sample::select(vec![
                    "hello", "   ", "\u{4}", "▁", "▁hi", " hi", "ab", "<|endoftext|>", "</s>", "\u{212A}", "é", "🙂",
                    "\u{3b9}\u{308}\u{301}", "\u{1112}\u{1161}\u{11ab}", "\u{3b1}\u{313}\u{300}\u{345}",
                ]),
                0..40,
            ),
        ) {
            let text = pieces.concat();
            for file in [byte_level(), sentence_piece(), composing(), incomplete()] {
                let tokenizer = load(&file);
                let least = tokenizer.at_least(&text);
                let all_lost = text.trim_matches('\u{4}').is_empty();
                prop_assert!(least > 0 || all_lost);
                prop_assert!(tokenizer.encode(&text, false).unwrap().len() >= least);
            }
        }
    }
}
