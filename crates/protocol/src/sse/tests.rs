use super::*;
use crate::sse::{DONE, comment, data, json};
use proptest::prelude::*;

fn parse(chunks: &[&[u8]]) -> Vec<Item> {
    let mut parser = Parser::new(1 << 20);
    let mut out = Vec::new();
    for chunk in chunks {
        parser.push(chunk, &mut out).expect("within the bound");
    }
    assert!(!parser.is_mid_event());
    out
}

fn events(items: &[Item]) -> Vec<String> {
    items
        .iter()
        .filter_map(|item| match item {
            Item::Event(event) => Some(String::from_utf8(event.data.to_vec()).unwrap()),
            Item::Comment(_) => None,
        })
        .collect()
}

/// The case stream-framing-variants.
const FRAMING: [&str; 4] =
    ["data: {\"a\":1}\n", "\ndata: {\"a\":2}\r", "\n\r\nda", "ta: {\"a\":3}\n\n: ping\n\ndata:{\"a\":4}\n\n"];

#[test]
fn stream_framing_variants_give_the_same_events_for_every_chunking() {
    let right = ["{\"a\":1}", "{\"a\":2}", "{\"a\":3}", "{\"a\":4}"];
    let joined = FRAMING.concat();
    let given: Vec<&[u8]> = FRAMING.iter().map(|chunk| chunk.as_bytes()).collect();
    let single: Vec<&[u8]> = joined.as_bytes().chunks(1).collect();
    for chunks in [given, single, vec![joined.as_bytes()]] {
        let items = parse(&chunks);
        assert_eq!(events(&items), right);
        assert_eq!(items.len(), 5, "one comment");
    }
}

#[test]
fn done_inside_a_payload_is_not_the_end_mark() {
    let chunks: [&[u8]; 3] = [b"data: {\"arguments\":\"echo ", b"data: [DONE]\"}\n\ndata: [D", b"ONE]\n\n"];
    let ends: Vec<bool> =
        parse(&chunks).iter().map(|item| matches!(item, Item::Event(event) if event.is_done())).collect();
    assert_eq!(ends, [false, true]);
}

#[test]
fn a_character_cut_by_the_network_stays_whole() {
    let text = "data: {\"content\":\"東京\"}\n\n".as_bytes();
    for cut in 0..text.len() {
        assert_eq!(events(&parse(&[&text[..cut], &text[cut..]])), ["{\"content\":\"東京\"}"]);
    }
}

#[test]
fn several_data_lines_are_joined_and_other_fields_kept() {
    let items =
        parse(&[b"\xef\xbb\xbfevent: x\nid: 7\nretry: 5\ndata: a\ndata:  b\ndata\n\nevent: alone\n\n"]);
    let event = Event { name: Some("x".into()), id: Some("7".into()), data: Bytes::from_static(b"a\n b\n") };
    assert_eq!(items, [Item::Event(event)]);
}

#[test]
fn a_half_event_is_withheld() {
    let mut parser = Parser::new(1024);
    let mut out = Vec::new();
    parser.push(b"data: {\"par", &mut out).unwrap();
    assert!(out.is_empty() && parser.is_mid_event());
}

#[test]
fn an_event_over_the_bound_is_refused_in_one_line_or_many() {
    let mut out = Vec::new();
    assert_eq!(Parser::new(16).push(&[b'x'; 17], &mut out), Err(TooLong { limit: 16 }));
    let mut parser = Parser::new(16);
    parser.push(b"data: 1234\n", &mut out).unwrap();
    assert_eq!(parser.push(b"data: 12345678901\n", &mut out), Err(TooLong { limit: 16 }));
    let mut parser = Parser::new(16);
    for _ in 0..1000 {
        parser.push(b"data: 1234\n\n", &mut out).expect("the bound is an event's, not the stream's");
    }
}

#[test]
fn what_the_writer_writes_the_parser_reads() {
    let stream =
        [data("a\nb\r\nc"), comment("x\ny"), json(&serde_json::json!({"t": "\n"})).unwrap(), DONE].concat();
    let items = parse(&[&stream]);
    assert_eq!(events(&items), ["a\nb\nc", "{\"t\":\"\\n\"}", "[DONE]"]);
    assert_eq!(items[1], Item::Comment(Bytes::from_static(b"x y")));
}

proptest! {
    #[test]
    fn any_cut_of_any_stream_gives_the_same_items(
        lines in prop::collection::vec(("[ -9;-~é東]{0,12}", prop::sample::select(vec!["\n", "\r\n", "\r"]), any::<bool>()), 0..20),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let mut stream = String::new();
        for (text, end, blank) in lines {
            stream.push_str("data: ");
            stream.push_str(&text);
            stream.push_str(end);
            if blank {
                stream.push_str(end);
            }
        }
        stream.push_str("\n\n");
        let bytes = stream.as_bytes();
        let mut places: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        places.extend([0, bytes.len()]);
        places.sort_unstable();
        let pieces: Vec<&[u8]> = places.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
        prop_assert_eq!(parse(&pieces), parse(&[bytes]));
    }

    #[test]
    fn any_bytes_are_parsed_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut out = Vec::new();
        let _ = Parser::new(64).push(&bytes, &mut out);
    }
}
