//! Small tokenizers for tests, in the two families that real models use.

use serde_json::{Map, Value, json};

use crate::special::byte_of;

/// ChatML ids of [`byte_level`].
pub(crate) const IM_START: u32 = 1;
pub(crate) const IM_END: u32 = 2;

fn added(id: u32, content: &str, special: bool) -> Value {
    json!({
        "id": id, "content": content, "special": special,
        "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
    })
}

/// The character of GPT-2's alphabet that stands for a byte.
pub(crate) fn letter(byte: u8) -> char {
    (0..0x144).filter_map(char::from_u32).find(|&c| byte_of(c) == Some(byte)).expect("all bytes have one")
}

/// Byte-level BPE: three special ids, an added word of spaces, all 256 bytes from id 4, then merges.
pub(crate) fn byte_level() -> Value {
    let mut vocab = Map::new();
    for (id, text) in ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "   "].iter().enumerate() {
        vocab.insert((*text).to_owned(), id.into());
    }
    for byte in 0..=255u8 {
        vocab.insert(letter(byte).to_string(), (4 + u32::from(byte)).into());
    }
    let merges =
        ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "u s", "us e", "use r", "Ċ Ċ", "ð Ł", "Ļ Ĥ"];
    for merge in merges {
        let next = vocab.len();
        vocab.insert(merge.replace(' ', ""), next.into());
    }
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [
            added(0, "<|endoftext|>", true), added(1, "<|im_start|>", true), added(2, "<|im_end|>", true),
            added(3, "   ", false),
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        },
    })
}

/// SentencePiece-style BPE with byte fallback and a begin mark: bytes from id 3, then pieces.
pub(crate) fn sentence_piece() -> Value {
    let mut vocab = Map::new();
    for (id, text) in ["<unk>", "<s>", "</s>"].iter().enumerate() {
        vocab.insert((*text).to_owned(), id.into());
    }
    for byte in 0..=255u8 {
        vocab.insert(format!("<0x{byte:02X}>"), (3 + u32::from(byte)).into());
    }
    for piece in ["▁", "a", "b", "h", "i", "▁h", "▁hi", "ab"] {
        let next = vocab.len();
        vocab.insert(piece.to_owned(), next.into());
    }
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(0, "<unk>", true), added(1, "<s>", true), added(2, "</s>", true)],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": null,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": ["▁ h", "▁h i", "a b"],
        },
    })
}

/// A vocabulary in which id i stands for `pieces[i]`; those in `special` are special.
pub(crate) fn pieces(pieces: &[&[u8]], special: &[u32]) -> std::sync::Arc<crate::Vocabulary> {
    let file = json!({"decoder": {"type": "ByteLevel"}});
    let spelt =
        pieces.iter().enumerate().map(|(id, bytes)| (id as u32, bytes.iter().map(|&b| letter(b)).collect()));
    let added: Vec<(u32, String, bool)> = special
        .iter()
        .map(|&id| (id, String::from_utf8_lossy(pieces[id as usize]).into_owned(), true))
        .collect();
    std::sync::Arc::new(crate::Vocabulary::build(&file, spelt, &added))
}
