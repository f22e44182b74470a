//! Stop strings and UTF-8 over any chunking, against a reference that sees the whole text at once.

use proptest::prelude::*;

use super::*;
use crate::fixtures::pieces;

fn options(stop: &[&str]) -> TextOptions {
    TextOptions { stop: stop.iter().map(|s| (*s).to_owned()).collect(), ..TextOptions::default() }
}

fn stream(texts: &[&str], options: TextOptions) -> TextStream {
    let bytes: Vec<&[u8]> = texts.iter().map(|t| t.as_bytes()).collect();
    TextStream::new(pieces(&bytes, &[]), options).unwrap()
}

/// Pushes ids 0, 1, … in chunks: all text, tokens consumed, the stop.
fn run(mut stream: TextStream, ids: &[u32], chunk: usize) -> (String, usize, Option<String>) {
    let (mut text, mut consumed) = (String::new(), 0);
    for ids in ids.chunks(chunk) {
        let step = stream.push(ids);
        text += &step.text;
        consumed += step.consumed;
        if step.matched.is_some() {
            assert_eq!(stream.push(&[0]), TextStep::default(), "nothing is taken after a stop");
            assert_eq!(stream.finish(), "");
            return (text, consumed, step.matched);
        }
        assert_eq!(step.consumed, ids.len());
    }
    text += &stream.finish();
    (text, consumed, None)
}

fn check(texts: &[&str], stop: &[&str], expected: (&str, usize, Option<&str>)) {
    let ids: Vec<u32> = (0..texts.len() as u32).collect();
    for chunk in 1..=texts.len() {
        let (text, consumed, matched) = run(stream(texts, options(stop)), &ids, chunk);
        assert_eq!((text.as_str(), consumed, matched.as_deref()), expected, "chunks of {chunk}");
    }
}

#[test]
fn text_stop_prefix_withheld() {
    check(&["KLM", "N", "OP", "Q", "R"], &["KLMNOPQ"], ("", 4, Some("KLMNOPQ")));
    check(&["KLM", "N", "OX"], &["KLMNOPQ"], ("KLMNOX", 3, None));
    check(&["KLM"], &["KLMNOPQ"], ("KLM", 1, None));
}

#[test]
fn text_stop_inside_token_with_tail() {
    check(&["north", " south", " eas", "t west"], &["south east"], ("north ", 4, Some("south east")));
}

#[test]
fn text_stop_newline_prefix_kept() {
    let texts = ["line1", "\n", "line2", "\n", "<|endoftext|>"];
    check(&texts, &["\n<|endoftext|>"], ("line1\nline2", 5, Some("\n<|endoftext|>")));
}

#[test]
fn text_stop_two_stops_overlap() {
    let text = "xabcde";
    for cuts in 0..32u32 {
        let (mut parts, mut start) = (Vec::new(), 0);
        for at in 1..text.len() {
            if cuts >> (at - 1) & 1 == 1 {
                parts.push(&text[start..at]);
                start = at;
            }
        }
        parts.push(&text[start..]);
        let ids: Vec<u32> = (0..parts.len() as u32).collect();
        let (emitted, _, matched) = run(stream(&parts, options(&["abcd", "bc"])), &ids, 1);
        assert_eq!((emitted.as_str(), matched.as_deref()), ("xa", Some("bc")), "{parts:?}");
    }
}

#[test]
fn of_two_stops_that_end_together_the_longer_wins() {
    check(&["xab", "cd"], &["bc", "abc"], ("x", 2, Some("abc")));
    check(&["xab", "cd"], &["abc", "bc"], ("x", 2, Some("abc")));
}

#[test]
fn text_stop_multi_token_step() {
    check(&["x", " la", " la", " la", " y", " z"], &[" la la la"], ("x", 4, Some(" la la la")));
}

#[test]
fn text_utf8_emoji_two_tokens() {
    let vocabulary = pieces(&[b"\xf0\x9f", b"\x99\x82"], &[]);
    let mut whole = TextStream::new(vocabulary.clone(), TextOptions::default()).unwrap();
    assert_eq!(whole.push(&[0]).text, "");
    assert_eq!(whole.push(&[1]).text, "🙂");
    assert_eq!(whole.finish(), "");
    let mut truncated = TextStream::new(vocabulary, TextOptions::default()).unwrap();
    assert_eq!(truncated.push(&[0]).text, "");
    assert_eq!(truncated.finish(), "\u{FFFD}", "an unfinished tail is exactly one mark");
}

#[test]
fn text_utf8_three_syllables_nine_tokens() {
    let bytes = "값싼콩".as_bytes();
    let tokens: Vec<&[u8]> = bytes.chunks(1).collect();
    let ids: Vec<u32> = (0..9).collect();
    for step in [1, 2, 4, 9] {
        let mut stream = TextStream::new(pieces(&tokens, &[]), TextOptions::default()).unwrap();
        let mut deltas: Vec<String> = ids.chunks(step).map(|ids| stream.push(ids).text).collect();
        deltas.push(stream.finish());
        deltas.retain(|delta| !delta.is_empty());
        assert_eq!(deltas.concat(), "값싼콩");
        assert!(deltas.len() <= 3 && !deltas.concat().contains('\u{FFFD}'));
    }
}

#[test]
fn text_detok_state_capacity() {
    let texts: Vec<String> = (0..180).map(|i| format!("{i}é ")).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let mut streams: Vec<TextStream> = (0..9).map(|_| stream(&texts, options(&["never"]))).collect();
    let mut all = vec![String::new(); 9];
    for round in 0..20 {
        for (i, stream) in streams.iter_mut().enumerate() {
            all[i] += &stream.push(&[(i * 20 + round) as u32]).text;
        }
    }
    for (i, stream) in streams.iter_mut().enumerate() {
        all[i] += &stream.finish();
        assert_eq!(all[i], texts[i * 20..i * 20 + 20].concat());
    }
}

#[test]
fn special_tokens_are_skipped_on_wish_and_never_split_a_stop() {
    let vocabulary = pieces(&[b"S", b"<end>", b"TOP", b"x"], &[1]);
    for (skip_special, expected, matched) in [(true, "", Some("STOP")), (false, "S<end>TOPx", None)] {
        let options = TextOptions { skip_special, ..options(&["STOP"]) };
        let (text, _, found) = run(TextStream::new(vocabulary.clone(), options).unwrap(), &[0, 1, 2, 3], 1);
        assert_eq!((text.as_str(), found.as_deref()), (expected, matched));
    }
    let (text, consumed, _) =
        run(TextStream::new(vocabulary, TextOptions::default()).unwrap(), &[7, 3, u32::MAX], 1);
    assert_eq!((text.as_str(), consumed), ("x", 3), "ids without an entry give nothing");
}

#[test]
fn include_stop_keeps_the_stop_and_cuts_what_follows() {
    let with_stop = TextOptions { include_stop: true, ..options(&["de"]) };
    let (text, consumed, matched) = run(stream(&["abc", "d", "efg"], with_stop), &[0, 1, 2], 1);
    assert_eq!((text.as_str(), consumed, matched.as_deref()), ("abcde", 3, Some("de")));
}

#[test]
fn stops_within_min_tokens_are_released() {
    for (min_tokens, expected) in [(0, ("", 1)), (1, ("a,", 2)), (2, ("a,a,", 3)), (3, ("a,a,a,", 3))] {
        let options = TextOptions { min_tokens, ..options(&["a,"]) };
        let (text, consumed, matched) = run(stream(&["a,", "a,", "a,"], options), &[0, 1, 2], 1);
        assert_eq!((text.as_str(), consumed), expected, "min_tokens {min_tokens}");
        assert_eq!(matched.is_some(), min_tokens < 3);
    }
    let mut early = stream(&["a,"], TextOptions { min_tokens: 1, ..options(&["a,"]) });
    assert_eq!(early.push(&[0]).text, "a,", "an ignored stop isn't held back");
}

#[test]
fn only_what_could_become_a_stop_is_held() {
    let mut stream = stream(&["xx\n", "\n", "y", "é\n"], options(&["\n\nUser:"]));
    assert_eq!(stream.push(&[0]).text, "xx");
    assert_eq!(stream.push(&[1]).text, "");
    assert_eq!(stream.push(&[2]).text, "\n\ny");
    assert_eq!(stream.push(&[3]).text, "é");
    assert_eq!(stream.finish(), "\n");
}

#[test]
fn empty_and_oversized_stops_are_refused_by_name() {
    let vocabulary = pieces(&[b"x"], &[]);
    let error = TextStream::new(vocabulary.clone(), options(&["a", ""])).unwrap_err();
    assert_eq!(error.field.as_deref(), Some("stop[1]"));
    let long = "x".repeat((1 << 20) + 1);
    assert_eq!(TextStream::new(vocabulary, options(&[&long])).unwrap_err().field.as_deref(), Some("stop"));
}

/// The rules, read off the whole byte string: the first end, then the longest stop.
fn reference(
    tokens: &[Vec<u8>],
    stops: &[String],
    min_tokens: usize,
    include_stop: bool,
) -> (String, usize, Option<String>) {
    let all: Vec<u8> = tokens.concat();
    let mut ends = Vec::new();
    for (index, token) in tokens.iter().enumerate() {
        ends.extend(std::iter::repeat_n(index + 1, token.len()));
    }
    for end in 1..=all.len() {
        let best =
            stops.iter().filter(|stop| all[..end].ends_with(stop.as_bytes())).max_by_key(|stop| stop.len());
        if let Some(stop) = best
            && ends[end - 1] > min_tokens
        {
            let cut = if include_stop { end } else { end - stop.len() };
            return (String::from_utf8_lossy(&all[..cut]).into_owned(), ends[end - 1], Some(stop.clone()));
        }
    }
    (String::from_utf8_lossy(&all).into_owned(), tokens.len(), None)
}

fn byte() -> impl Strategy<Value = u8> {
    prop_oneof![4 => Just(b'a'), 4 => Just(b'b'), 2 => Just(0xC3), 2 => Just(0xA9), 1 => Just(0xF0), 1 => Just(0x9F), 1 => any::<u8>()]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn any_chunking_gives_the_text_and_stop_of_the_whole(
        tokens in prop::collection::vec(prop::collection::vec(byte(), 0..4), 1..14),
        stops in prop::collection::vec("[abé]{1,4}", 0..4),
        cuts in prop::collection::vec(1usize..5, 14),
        min_tokens in 0usize..5,
        include_stop: bool,
    ) {
        let expected = reference(&tokens, &stops, min_tokens, include_stop);
        let bytes: Vec<&[u8]> = tokens.iter().map(Vec::as_slice).collect();
        let vocabulary = pieces(&bytes, &[]);
        let options = TextOptions { stop: stops, include_stop, min_tokens, ..TextOptions::default() };
        let mut stream = TextStream::new(vocabulary, options).unwrap();
        let ids: Vec<u32> = (0..tokens.len() as u32).collect();
        let (mut text, mut consumed, mut matched, mut rest) = (String::new(), 0, None, ids.as_slice());
        for cut in cuts {
            let (now, later) = rest.split_at(cut.min(rest.len()));
            let step = stream.push(now);
            text += &step.text;
            consumed += step.consumed;
            rest = later;
            matched = step.matched;
            if matched.is_some() || rest.is_empty() {
                break;
            }
        }
        text += &stream.finish();
        prop_assert_eq!((text, consumed, matched), expected);
    }
}
