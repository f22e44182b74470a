use super::*;
use proptest::prelude::*;

/// Feeds the bytes in the given cuts; what was handed on before a fault, and the fault.
fn feed<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> (Vec<u8>, Option<Fault>) {
    let mut framing = Framing::new(1 << 16);
    let (mut held, mut passed) = (Vec::new(), Vec::new());
    for piece in pieces {
        held.extend_from_slice(piece);
        loop {
            match framing.take(&held) {
                Ok(0) => break,
                Ok(count) => passed.extend(held.drain(..count)),
                Err(fault) => return (passed, Some(fault)),
            }
        }
    }
    (passed, None)
}

fn at_once(text: &str) -> Option<Fault> {
    feed(std::iter::once(text.as_bytes())).1
}

const GOOD: &[&str] = &[
    "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "\r\nGET / HTTP/1.1\r\nhost: [::1]:80\r\nx:\r\n\r\n",
    "GET / HTTP/1.0\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: a:1\r\nContent-Length: 4\r\n\r\na\nb\rGET / HTTP/1.1\r\nhost: a\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\na\nb\r\n0\r\nt: 1\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\n\0anything\n",
];

const BAD: &[(&str, Fault)] = &[
    ("GET / HTTP/1.1\nHost: a\n\n", Fault::BareLineEnd),
    ("GET / HTTP/1.1\r\nHost: a\nx: 1\r\n\r\n", Fault::BareLineEnd),
    ("GET / HTTP/1.1\r\nHost: a\rx: 1\r\n\r\n", Fault::BareLineEnd),
    (
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
        Fault::TwoLengths,
    ),
    (
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n",
        Fault::TwoLengths,
    ),
    ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nContent-Length: 4\r\n\r\n", Fault::BadLength),
    ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +4\r\n\r\n", Fault::BadLength),
    ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4, 4\r\n\r\n", Fault::BadLength),
    ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n\r\n", Fault::BadLength),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", Fault::BadEncoding),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n", Fault::BadEncoding),
    ("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", Fault::BadEncoding),
    ("GET / HTTP/1.1\r\nx: 1\r\n\r\n", Fault::BadHost),
    ("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", Fault::BadHost),
    ("GET / HTTP/1.1\r\nHost:\r\n\r\n", Fault::BadHost),
    ("GET / HTTP/1.1\r\nHost: a/b@c\r\n\r\n", Fault::BadHost),
    ("GET / HTTP/1.1\r\nHost: a\r\nx : 1\r\n\r\n", Fault::BadHeader),
    ("GET / HTTP/1.1\r\nHost: a\r\nx: 1\r\n folded\r\n\r\n", Fault::BadHeader),
    ("GET / HTTP/1.1\r\nHost: a\r\nnothing\r\n\r\n", Fault::BadHeader),
    ("GET / HTTP/1.1\r\nHost: a\r\n: 1\r\n\r\n", Fault::BadHeader),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\nabc\r\n", Fault::BadChunk),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n", Fault::BadChunk),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n", Fault::BadChunk),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n", Fault::BadChunk),
];

#[test]
fn requests_with_one_reading_pass_whole_and_in_order() {
    for text in GOOD {
        let (passed, fault) = feed(std::iter::once(text.as_bytes()));
        assert_eq!((String::from_utf8_lossy(&passed).as_ref(), fault), (*text, None));
    }
}

#[test]
fn heads_with_two_readings_are_refused_and_none_of_their_bytes_pass() {
    for (text, fault) in BAD {
        assert_eq!(at_once(text), Some(*fault), "{text:?}");
        let after = format!("{}{text}", GOOD[0]);
        let (passed, found) = feed(std::iter::once(after.as_bytes()));
        assert_eq!(found, Some(*fault), "behind a good one: {text:?}");
        assert!(passed.starts_with(GOOD[0].as_bytes()));
    }
}

#[test]
fn a_head_that_is_not_whole_is_held_and_one_that_is_too_long_is_left_to_the_parser() {
    assert_eq!(feed(std::iter::once(&b"GET / HTTP/1.1\r\nHost: a\r\n"[..])), (Vec::new(), None));
    assert_eq!(feed(std::iter::once(&b"PRI * HTTP/2.0\r\n\r\n"[..])), (Vec::new(), None));
    let long = format!("GET / HTTP/1.1\r\nx: {}", "y".repeat(1 << 17));
    assert_eq!(feed(std::iter::once(long.as_bytes())).0.len(), long.len());
}

#[test]
fn each_fault_is_known_again_by_its_stand_in() {
    for fault in Fault::ALL {
        let head = String::from_utf8(fault.stand_in()).expect("text");
        let path = head.split(' ').nth(1).expect("a path");
        assert_eq!(Fault::of_path(path), Some(fault));
        assert_eq!(at_once(&head), None);
    }
    assert_eq!(Fault::of_path("/health"), None);
}

proptest! {
    #[test]
    fn any_cut_has_the_same_outcome(which in 0..GOOD.len() + BAD.len(), cuts: Vec<prop::sample::Index>) {
        let text = match which.checked_sub(GOOD.len()) {
            Some(bad) => format!("{}{}", GOOD[3], BAD[bad].0),
            None => GOOD[which].to_owned(),
        };
        let bytes = text.as_bytes();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let pieces = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]);
        prop_assert_eq!(feed(pieces), feed(std::iter::once(bytes)));
    }

    #[test]
    fn any_bytes_are_survived_and_none_is_invented(bytes: Vec<u8>) {
        let (passed, _) = feed(std::iter::once(&bytes[..]));
        prop_assert!(bytes.starts_with(&passed));
    }
}
