//! A small tokenizer.json: one token a byte, and a few special ones.

use serde_json::{Map, Value, json};

/// Byte-level BPE without merges: ids 0..256 are the bytes in the order of the byte alphabet's characters for them,
/// 256 is `<|im_start|>`, 257 is `<|im_end|>`.
pub fn byte_tokenizer_json() -> Vec<u8> {
    let mut vocabulary = Map::new();
    for byte in 0..=255_u8 {
        vocabulary.insert(character(byte).to_string(), json!(byte));
    }
    vocabulary.insert("<|im_start|>".into(), json!(256));
    vocabulary.insert("<|im_end|>".into(), json!(257));
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let document = json!({
        "version": "1.0", "truncation": Value::Null, "padding": Value::Null,
        "added_tokens": [special(256, "<|im_start|>"), special(257, "<|im_end|>")],
        "normalizer": Value::Null, "pre_tokenizer": level, "post_processor": Value::Null, "decoder": level,
        "model": {"type": "BPE", "dropout": Value::Null, "unk_token": Value::Null, "continuing_subword_prefix": Value::Null,
                  "end_of_word_suffix": Value::Null, "fuse_unk": false, "byte_fallback": false,
                  "vocab": vocabulary, "merges": []},
    });
    document.to_string().into_bytes()
}

/// The printable character that stands for a byte in byte-level vocabularies.
fn character(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|other| !printable(*other)).count() as u32;
    char::from_u32(256 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}
