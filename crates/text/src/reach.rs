//! How much of a text one token can stand for, which bounds from below the tokens of a text of known length.
//!
//! Only for tokenizers that drop nothing: where the file says something not known here, there is no bound.

use serde_json::Value;

use crate::vocabulary::Vocabulary;

/// Normalising makes text at most this many times shorter: composed characters and the replacements of `▁` take
/// at least a third of the bytes they are made from.
const SHRINK: usize = 4;

/// Most bytes of a text that become one token; none if there is no such bound.
pub(crate) fn reach(file: &Value, vocabulary: &Vocabulary) -> Option<usize> {
    let model = &file["model"];
    let covered = model["byte_fallback"] == true || any(&file["pre_tokenizer"], "ByteLevel");
    let strips = |token: &Value| token["lstrip"] == true || token["rstrip"] == true;
    let keeps = model["type"] == "BPE"
        && covered
        && vocabulary.has_all_bytes()
        && all(&file["pre_tokenizer"], &keeps_pieces)
        && all(&file["normalizer"], &keeps_length)
        && !file["added_tokens"].as_array().into_iter().flatten().any(strips);
    let plain = file["normalizer"].is_null() && !any(&file["pre_tokenizer"], "Metaspace");
    keeps.then(|| vocabulary.longest() * if plain { 1 } else { SHRINK })
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

    fn composing() -> serde_json::Value {
        let mut file = byte_level();
        file["normalizer"] = json!({"type": "NFC"});
        file
    }

    #[test]
    fn the_longest_token_gives_the_bound() {
        let tokenizer = load(&byte_level());
        assert_eq!(tokenizer.vocabulary().longest(), "<|endoftext|>".len());
        assert_eq!([0, 1, 13, 14, 1300].map(|bytes| tokenizer.at_least(bytes)), [0, 1, 1, 2, 100]);
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
            assert_eq!(load(&file).at_least(1 << 30), 0, "{}", file["normalizer"]);
        }
    }

    proptest! {
        #[test]
        fn no_text_has_fewer_tokens_than_the_bound_says(
            pieces in proptest::collection::vec(
                proptest::sample::select(vec![
                    "hello", "   ", "▁", "▁hi", " hi", "ab", "<|endoftext|>", "</s>", "\u{212A}", "é", "🙂",
                    "\u{3b9}\u{308}\u{301}", "\u{1112}\u{1161}\u{11ab}", "\u{3b1}\u{313}\u{300}\u{345}",
                ]),
                0..40,
            ),
        ) {
            let text = pieces.concat();
            for file in [byte_level(), sentence_piece(), composing()] {
                let tokenizer = load(&file);
                let least = tokenizer.at_least(text.len());
                prop_assert!(least > 0 || text.is_empty());
                prop_assert!(tokenizer.encode(&text, false).unwrap().len() >= least);
            }
        }
    }
}
