//! Encoding, decoding and the proof that the cache never changes an id.

use proptest::prelude::*;

use super::*;
use crate::fixtures::{IM_END, IM_START, byte_level, sentence_piece};

fn load(file: &Value, cache_bytes: usize) -> Tokenizer {
    Tokenizer::with_cache_bytes(file.to_string().as_bytes(), cache_bytes).unwrap()
}

#[test]
fn byte_level_text_round_trips_and_merges() {
    let tokenizer = Tokenizer::from_json(byte_level().to_string().as_bytes()).unwrap();
    let text = "hello wo 🙂 값\n\nuser   x\0";
    let ids = tokenizer.encode(text, false).unwrap();
    assert!(ids.len() < text.len());
    assert_eq!(tokenizer.decode(&ids, true), text);
    let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.vocabulary().bytes(id)).copied().collect();
    assert_eq!(bytes, text.as_bytes());
}

#[test]
fn text_that_spells_a_special_token_gives_its_id() {
    let tokenizer = load(&byte_level(), 0);
    let ids = tokenizer.encode("<|im_start|>user<|im_end|>", false).unwrap();
    assert_eq!((ids[0], *ids.last().unwrap()), (IM_START, IM_END));
    assert_eq!(tokenizer.decode(&ids, true), "user");
    assert_eq!(tokenizer.decode(&ids, false), "<|im_start|>user<|im_end|>");
    assert_eq!(tokenizer.decode(&[9_999_999], false), "", "ids without an entry give nothing");
}

#[test]
fn sentence_piece_falls_back_to_bytes_and_adds_its_begin_mark() {
    let tokenizer = load(&sentence_piece(), 0);
    let ids = tokenizer.encode("hi é", true).unwrap();
    assert_eq!(ids[0], 1);
    assert_eq!(tokenizer.encode("hi é", false).unwrap(), ids[1..]);
    let vocabulary = tokenizer.vocabulary();
    let bytes: Vec<u8> = ids[1..].iter().flat_map(|&id| vocabulary.bytes(id)).copied().collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), " hi é", "the stream's bytes keep the first space");
    assert_eq!(tokenizer.decode(&ids, true), "hi é", "the decoder strips it");
    assert!(vocabulary.is_special(1) && !vocabulary.is_special(3));
    assert_eq!(vocabulary.bytes(3 + 0xC3), [0xC3]);
    assert_eq!(vocabulary.text(3 + 0xC3), "\u{FFFD}");
}

#[test]
fn vocabulary_answers_for_ids_it_does_not_have() {
    let mut file = byte_level();
    file["added_tokens"].as_array_mut().unwrap().push(serde_json::json!({
        "id": 1000, "content": "<far>", "special": true,
        "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
    }));
    let tokenizer = load(&file, 0);
    let vocabulary = tokenizer.vocabulary();
    let far = tokenizer.encode("<far>", false).unwrap()[0];
    assert_eq!(vocabulary.text(far), "<far>");
    assert!(vocabulary.is_special(far));
    for id in [vocabulary.len() as u32, u32::MAX] {
        assert!(vocabulary.bytes(id).is_empty() && !vocabulary.is_special(id));
    }
    assert!(vocabulary.memory_bytes() >= vocabulary.len() * 4);
}

#[test]
fn broken_files_are_refused_with_a_reason() {
    for data in [&b""[..], b"{", b"[]", b"{\"model\": {\"type\": \"Nope\"}}", b"\xFF"] {
        let error = Tokenizer::from_json(data).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidArgument);
        assert!(error.message.starts_with("tokenizer.json can't be read: "), "{}", error.message);
    }
}

#[test]
fn truncation_and_padding_of_the_file_are_dropped() {
    let mut file = byte_level();
    file["truncation"] = serde_json::json!(
        {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    let ids = load(&file, 0).encode("abcdefgh", true).unwrap();
    assert_eq!(ids.len(), 8);
}

#[test]
fn later_turns_of_a_conversation_reuse_the_encoded_messages() {
    let tokenizer = load(&byte_level(), 1 << 20);
    let mut text = String::new();
    for turn in 0..5 {
        text += &format!("<|im_start|>user\n{}{turn}<|im_end|>\n", "word ".repeat(20));
        tokenizer.encode(&text, false).unwrap();
    }
    let stats = tokenizer.cache_stats();
    assert!(stats.hits >= 6 && stats.bytes > 0 && stats.bytes <= stats.budget, "{stats:?}");
}

#[test]
fn the_cache_keeps_its_budget() {
    let tokenizer = load(&byte_level(), 20_000);
    for i in 0..500 {
        tokenizer.encode(&format!("<|im_start|>{i} {}", "x".repeat(i)), false).unwrap();
        let stats = tokenizer.cache_stats();
        assert!(stats.bytes <= stats.budget, "{stats:?}");
    }
    assert!(tokenizer.cache_stats().bytes > 5_000);
}

fn texts() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        Just("<|im_start|>".to_owned()),
        Just("<|im_end|>".to_owned()),
        Just("<|im_".to_owned()),
        Just("start|>".to_owned()),
        Just("</s>".to_owned()),
        Just("<s>".to_owned()),
        Just("   ".to_owned()),
        Just("hello world, this is a text that is long enough to be cut off after it".to_owned()),
        "[ \\nahbi<|>é🙂]{0,30}",
        "\\PC{0,12}",
    ];
    prop::collection::vec(part, 0..14).prop_map(|parts| parts.concat())
}

/// A tokenizer that puts marks around texts and pairs, as BERT's does.
fn marked() -> Tokenizer {
    let mut file = byte_level();
    file["post_processor"] = serde_json::json!({
        "type": "BertProcessing", "sep": ["<|im_end|>", IM_END], "cls": ["<|im_start|>", IM_START]
    });
    load(&file, 0)
}

#[test]
fn a_text_is_cut_inside_its_marks() {
    let tokenizer = marked();
    let whole = tokenizer.encode("abcdef", true).unwrap();
    assert_eq!((whole.len(), whole[0], whole[7]), (8, IM_START, IM_END));
    for most in [8, 9, 1000] {
        assert_eq!(tokenizer.encode_cut("abcdef", most).unwrap(), whole);
    }
    let cut = tokenizer.encode_cut("abcdef", 5).unwrap();
    assert_eq!((&cut[..4], cut[4], cut.len()), (&whole[..4], IM_END, 5));
    assert_eq!(tokenizer.encode_cut("abc", 2).unwrap_err().field.as_deref(), Some("truncate_prompt_tokens"));
}

#[test]
fn a_pair_is_joined_marked_and_cut_at_the_end_of_its_second_text() {
    let tokenizer = marked();
    let ids = |text: &str| tokenizer.encode(text, false).unwrap();
    let (joined, types) = tokenizer.encode_pair("ab", "cdef", None).unwrap();
    assert_eq!(joined, [&[IM_START][..], &ids("ab"), &[IM_END], &ids("cdef"), &[IM_END]].concat());
    assert_eq!(types, [0, 0, 0, 0, 1, 1, 1, 1, 1]);
    let (cut, types) = tokenizer.encode_pair("ab", "cdef", Some(7)).unwrap();
    assert_eq!(cut, [&[IM_START][..], &ids("ab"), &[IM_END], &ids("cd"), &[IM_END]].concat());
    assert_eq!(types.len(), 7);
    assert_eq!(tokenizer.encode_pair("ab", "cdef", Some(9)).unwrap().0, joined);
    assert!(tokenizer.encode_pair("ab", "cdef", Some(5)).is_err(), "no room for the second text");
}

/// Tokenizers whose added tokens look at their neighbours: cuts must avoid or respect them.
fn variants() -> Vec<Value> {
    let mut variants = vec![byte_level(), sentence_piece()];
    for (token, option) in
        [(1, "lstrip"), (1, "rstrip"), (1, "single_word"), (1, "normalized"), (3, "rstrip"), (3, "lstrip")]
    {
        let mut file = byte_level();
        file["added_tokens"][token][option] = true.into();
        variants.push(file);
    }
    let mut metaspace = sentence_piece();
    metaspace["normalizer"] = Value::Null;
    metaspace["pre_tokenizer"] = serde_json::json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false});
    variants.push(metaspace);
    variants
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn cached_and_uncached_encoding_agree(texts in prop::collection::vec(texts(), 1..4)) {
        for file in variants() {
            let (cached, plain) = (load(&file, 4000), load(&file, 0));
            for text in texts.iter().chain(&texts) {
                for add_special in [false, true] {
                    let whole = plain.inner.encode_fast(text.as_str(), add_special).unwrap();
                    prop_assert_eq!(cached.encode(text, add_special).unwrap(), whole.get_ids(), "{:?}", text);
                    prop_assert_eq!(plain.encode(text, add_special).unwrap(), whole.get_ids());
                }
            }
        }
    }
}
