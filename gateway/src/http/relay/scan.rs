//! Finds where events end in a stream of bytes, in any cut, and which event ends the stream.
//!
//! Lines end in LF, CRLF or CR; an empty line ends an event. The end mark counts only as a whole line
//! that begins an event: the same text inside a payload is payload.

use memchr::memchr2;

/// How an API family says that a stream is complete, and how it says that it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// `data: [DONE]`: OpenAI chat and completions, SGLang generate.
    Done,
    /// `event: response.completed` and its like: OpenAI responses.
    Responses,
    /// `event: message_stop`: Anthropic messages.
    Messages,
    /// Unknown: a clean close is the end.
    Open,
}

impl Family {
    /// The family of a path.
    pub(crate) fn of(path: &str) -> Self {
        match path {
            "/v1/chat/completions" | "/v1/completions" | "/generate" => Self::Done,
            "/v1/responses" => Self::Responses,
            "/v1/messages" => Self::Messages,
            _ => Self::Open,
        }
    }

    /// Whether a first line of an event makes it the last event.
    fn ends_with(self, line: &[u8]) -> bool {
        let (field, value) = match memchr::memchr(b':', line) {
            Some(colon) => (&line[..colon], &line[colon + 1..]),
            None => return false,
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match self {
            Self::Done => field == b"data" && value == b"[DONE]",
            Self::Responses => {
                let ends: [&[u8]; 4] =
                    [b"response.completed", b"response.failed", b"response.incomplete", b"error"];
                field == b"event" && ends.contains(&value)
            }
            Self::Messages => field == b"event" && (value == b"message_stop" || value == b"error"),
            Self::Open => false,
        }
    }
}

/// Longest line that could end a stream, with room to see that it is longer.
const HEAD: usize = 32;

/// Scans one stream.
#[derive(Debug)]
pub(super) struct Scan {
    family: Family,
    /// First bytes of the current line, and its whole length.
    head: [u8; HEAD],
    length: usize,
    /// Non-empty lines of the current event so far.
    lines: usize,
    /// The current event's first line is the end mark.
    marked: bool,
    /// The last byte was a CR: a LF that follows belongs to it.
    after_cr: bool,
}

/// What a chunk brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    /// Bytes of the chunk up to the end of the last whole event in it; 0 if none ends there.
    pub(super) whole: usize,
    /// The last of these events ends the stream; bytes after it do not count.
    pub(super) last: bool,
}

impl Scan {
    pub(super) fn new(family: Family) -> Self {
        Self { family, head: [0; HEAD], length: 0, lines: 0, marked: false, after_cr: false }
    }

    /// Takes the next bytes.
    pub(super) fn feed(&mut self, chunk: &[u8]) -> Found {
        let mut found = Found { whole: 0, last: false };
        let mut at = 0;
        if self.after_cr && chunk.first() == Some(&b'\n') {
            at = 1;
            // Between events it belongs to the one that was complete already.
            if self.lines == 0 {
                found.whole = 1;
            }
        }
        self.after_cr &= chunk.is_empty();
        while let Some(length) = memchr2(b'\n', b'\r', &chunk[at..]) {
            let end = at + length;
            self.extend(&chunk[at..end]);
            at = end + 1;
            if chunk[end] == b'\r' {
                match chunk.get(at) {
                    Some(b'\n') => at += 1,
                    Some(_) => {}
                    None => self.after_cr = true,
                }
            }
            if self.end_line() {
                found.whole = at;
                if std::mem::take(&mut self.marked) {
                    found.last = true;
                    return found;
                }
            }
        }
        self.extend(&chunk[at..]);
        found
    }

    /// Whether what is unfinished is the end mark, all but the empty line after it: some servers close there.
    pub(super) fn ends_here(&mut self) -> bool {
        if self.length > 0 {
            self.end_line();
        }
        std::mem::take(&mut self.marked)
    }

    fn extend(&mut self, part: &[u8]) {
        if self.length < HEAD {
            let room = (HEAD - self.length).min(part.len());
            self.head[self.length..self.length + room].copy_from_slice(&part[..room]);
        }
        self.length += part.len();
    }

    /// Whether the line that ends here ends an event.
    fn end_line(&mut self) -> bool {
        let length = std::mem::take(&mut self.length);
        if length == 0 {
            self.lines = 0;
            return true;
        }
        // Only the very first line counts, so that text within an event can't end the stream.
        if self.lines == 0 && length < HEAD {
            self.marked = self.family.ends_with(&self.head[..length]);
        }
        // OpenAI's mark is an event of one line; the others' is followed by its data.
        if self.lines > 0 && self.family == Family::Done {
            self.marked = false;
        }
        self.lines += 1;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Bytes up to the end of the last whole event, and whether the end was seen.
    fn run<'a>(family: Family, chunks: impl Iterator<Item = &'a [u8]>) -> (usize, bool) {
        let mut scan = Scan::new(family);
        let (mut total, mut whole) = (0, 0);
        for chunk in chunks {
            let found = scan.feed(chunk);
            if found.whole > 0 {
                whole = total + found.whole;
            }
            if found.last {
                return (whole, true);
            }
            total += chunk.len();
        }
        (whole, false)
    }

    fn at_once(family: Family, text: &str) -> (usize, bool) {
        run(family, std::iter::once(text.as_bytes()))
    }

    #[test]
    fn only_a_whole_line_at_the_start_of_an_event_ends_the_stream() {
        for text in [
            "data: [DONE]\n\n",
            "data:[DONE]\r\n\r\n",
            "data: x\n\ndata: [DONE]\r\r",
            ": ping\n\ndata: [DONE]\n\n",
        ] {
            assert_eq!(at_once(Family::Done, text), (text.len(), true), "{text:?}");
        }
        for text in [
            "data: [DONE]\n",
            "data: [DONE]x\n\n",
            "data: x\ndata: [DONE]\n\n",
            "data: [DONE]\ndata: x\n\n",
            "data: {\"a\":\"data: [DONE]\"}\n\n",
            "id: 1\ndata: [DONE]\n\n",
            "event: [DONE]\n\n",
        ] {
            assert!(!at_once(Family::Done, text).1, "{text:?}");
        }
    }

    #[test]
    fn a_mark_without_its_empty_line_ends_a_stream_that_is_closed() {
        for (text, ends) in [
            ("data: x\n\ndata: [DONE]\n", true),
            ("data: x\n\ndata: [DONE]", true),
            ("data: x\n\ndata: [DON", false),
            ("data: x\n\n", false),
            ("data: x\ndata: [DONE]\n", false),
        ] {
            let mut scan = Scan::new(Family::Done);
            scan.feed(text.as_bytes());
            assert_eq!(scan.ends_here(), ends, "{text:?}");
        }
    }

    #[test]
    fn each_family_has_its_own_end() {
        let responses = "event: response.completed\ndata: {}\n\n";
        let messages = "event: message_stop\ndata: {}\n\n";
        assert_eq!(at_once(Family::Responses, responses), (responses.len(), true));
        assert_eq!(at_once(Family::Messages, messages), (messages.len(), true));
        assert!(!at_once(Family::Responses, messages).1);
        assert!(!at_once(Family::Messages, "data: [DONE]\n\n").1);
        assert!(!at_once(Family::Open, "data: [DONE]\n\n").1);
    }

    #[test]
    fn bytes_after_the_end_do_not_count() {
        assert_eq!(at_once(Family::Done, "data: [DONE]\n\ndata: more\n\n"), (14, true));
    }

    proptest! {
        #[test]
        fn any_cut_finds_the_same(text in "(data: x|: p|data: \\[DONE\\]|[a\u{e9}]{0,40})((\n|\r|\r\n){1,3}(data: y|data:\\[DONE\\])){0,6}(\n|\r\n){0,2}", cuts: Vec<prop::sample::Index>) {
            let bytes = text.as_bytes();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            cuts.sort_unstable();
            let mut from = 0;
            let mut parts = Vec::new();
            for cut in cuts {
                parts.push(&bytes[from..cut]);
                from = cut;
            }
            parts.push(&bytes[from..]);
            let (whole, last) = at_once(Family::Done, &text);
            let (cut_whole, cut_last) = run(Family::Done, parts.into_iter());
            prop_assert_eq!(cut_last, last);
            // A CR may be answered before its LF is seen.
            prop_assert!(cut_whole == whole || (last && bytes.get(cut_whole) == Some(&b'\n')), "{} {}", cut_whole, whole);
        }
    }
}
