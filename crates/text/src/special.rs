//! What tokenizer.json says beyond its vocabulary: how tokens spell bytes, and which cuts are safe.
//!
//! Read from the file itself, because the tokenizers crate keeps these parts behind closed enums.

use serde_json::Value;

/// How a token's text stands for bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Spelling {
    /// GPT-2's alphabet: each character is one byte.
    pub(crate) byte_level: bool,
    /// `<0xXX>` is the byte XX.
    pub(crate) byte_fallback: bool,
    /// Texts and what replaces them, such as `▁` by a space.
    pub(crate) replacements: Vec<(String, String)>,
}

impl Spelling {
    /// Reads the `decoder` of a tokenizer.json, and its sequence if it is one.
    pub(crate) fn of(file: &Value) -> Self {
        let mut spelling = Self::default();
        spelling.add(&file["decoder"]);
        spelling
    }

    fn add(&mut self, decoder: &Value) {
        match decoder["type"].as_str() {
            Some("Sequence") => {
                for part in decoder["decoders"].as_array().into_iter().flatten() {
                    self.add(part);
                }
            }
            Some("ByteLevel") => self.byte_level = true,
            Some("ByteFallback") => self.byte_fallback = true,
            Some("Metaspace") => {
                let mark = decoder["replacement"].as_str().unwrap_or("▁");
                self.replacements.push((mark.to_owned(), " ".to_owned()));
            }
            Some("Replace") => {
                if let (Some(from), Some(to)) =
                    (decoder["pattern"]["String"].as_str(), decoder["content"].as_str())
                {
                    self.replacements.push((from.to_owned(), to.to_owned()));
                }
            }
            _ => {}
        }
    }

    /// The bytes a token of the model's vocabulary stands for.
    pub(crate) fn bytes(&self, token: &str) -> Vec<u8> {
        if self.byte_level {
            // As the field does: a token with a character outside the alphabet stands for itself.
            return token
                .chars()
                .map(byte_of)
                .collect::<Option<Vec<u8>>>()
                .unwrap_or_else(|| token.as_bytes().to_vec());
        }
        if self.byte_fallback
            && let Some(hex) = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'))
            && hex.len() == 2
            && let Ok(byte) = u8::from_str_radix(hex, 16)
        {
            return vec![byte];
        }
        let mut text = token.to_owned();
        for (from, to) in &self.replacements {
            text = text.replace(from, to);
        }
        text.into_bytes()
    }
}

/// GPT-2's alphabet, backwards: printable Latin-1 stands for itself, the other 68 bytes for U+0100 upwards.
pub(crate) fn byte_of(character: char) -> Option<u8> {
    let code = u32::from(character);
    match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}
