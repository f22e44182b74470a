//! Incremental lossy UTF-8: the text of a byte stream, whatever pieces it comes in.
//!
//! Joined outputs equal `String::from_utf8_lossy` of all bytes at once.

/// Decodes `bytes` onto `text`, except for an unfinished character at the end; returns the bytes used.
pub(crate) fn decode_whole(bytes: &[u8], text: &mut String) -> usize {
    let mut used = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        used += chunk.valid().len();
        let invalid = chunk.invalid();
        if invalid.is_empty() {
            continue;
        }
        if used + invalid.len() == bytes.len() && is_unfinished(invalid) {
            return used;
        }
        text.push(char::REPLACEMENT_CHARACTER);
        used += invalid.len();
    }
    used
}

/// Whether more bytes could make `tail` a character; `tail` is one invalid chunk, so a lead and valid continuations.
fn is_unfinished(tail: &[u8]) -> bool {
    let length = match tail[0] {
        0xC2..=0xDF => 2,
        0xE0..=0xEF => 3,
        0xF0..=0xF4 => 4,
        _ => return false,
    };
    tail.len() < length
}

#[cfg(test)]
mod tests {
    use super::decode_whole;
    use proptest::prelude::*;

    fn in_pieces(pieces: &[&[u8]]) -> String {
        let (mut held, mut text) = (Vec::new(), String::new());
        for piece in pieces {
            held.extend_from_slice(piece);
            let used = decode_whole(&held, &mut text);
            held.drain(..used);
            assert!(held.len() < 4, "only an unfinished character is held");
        }
        text.push_str(&String::from_utf8_lossy(&held));
        text
    }

    #[test]
    fn every_byte_alone_decodes_as_all_at_once() {
        let bytes = b"a\xF0\x9F\x99\x82\xE2\x28\xED\xA0\x80\xF4\x90\x80\x80\xC0\x80\xFF\xF0\x9F";
        let pieces: Vec<&[u8]> = bytes.chunks(1).collect();
        assert_eq!(in_pieces(&pieces), String::from_utf8_lossy(bytes));
    }

    proptest! {
        #[test]
        fn any_cut_decodes_as_all_at_once(
            pieces in prop::collection::vec(
                prop::collection::vec(prop_oneof![Just(0xF0u8), Just(0x9F), Just(0x99), Just(0x82), Just(0xE2), Just(0x41), any::<u8>()], 0..5),
                0..12,
            )
        ) {
            let all: Vec<u8> = pieces.concat();
            let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
            prop_assert_eq!(in_pieces(&pieces), String::from_utf8_lossy(&all));
        }
    }
}
