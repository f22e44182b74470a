//! What an answer on its way says of the tokens that it cost, whichever API family it belongs to.
//!
//! Only looked at, never parsed: the fields of a `usage` have the same spelling wherever they stand, and text that
//! speaks of them has its quotes escaped.

use memchr::memmem;

/// Bytes of text a token, as long as nobody has counted.
pub(super) const BYTES_A_TOKEN: f64 = 4.0;
/// Bytes of the last piece that are looked at again: longer than any field and its number.
const KEPT: usize = 48;

/// Tokens of one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Told {
    /// Of prompt and output, by the worker.
    Counted(u64),
    /// Of the output, by its length.
    Guessed(u64),
}

/// Fields of all families: of a prompt, of an output, of both.
const FIELDS: [(&[u8], Part); 5] = [
    (b"\"total_tokens\"", Part::All),
    (b"\"prompt_tokens\"", Part::Prompt),
    (b"\"input_tokens\"", Part::Prompt),
    (b"\"completion_tokens\"", Part::Output),
    (b"\"output_tokens\"", Part::Output),
];

#[derive(Debug, Clone, Copy)]
enum Part {
    Prompt,
    Output,
    All,
}

/// What has been seen of an answer.
#[derive(Debug, Default)]
pub(super) struct Usage {
    is_stream: bool,
    prompt: u64,
    output: u64,
    all: u64,
    events: u64,
    bytes: u64,
    tail: Vec<u8>,
}

impl Usage {
    pub(super) fn of_stream(is_stream: bool) -> Self {
        Self { is_stream, ..Self::default() }
    }

    /// The next piece of the answer.
    pub(super) fn read(&mut self, data: &[u8]) {
        self.bytes += data.len() as u64;
        if self.is_stream {
            // An event is mostly a token.
            self.events += memmem::find_iter(data, b"data:").count() as u64;
        }
        // A field may have been cut in two.
        let joint = data.len().min(KEPT);
        self.tail.extend_from_slice(&data[..joint]);
        let tail = std::mem::take(&mut self.tail);
        self.look(&tail);
        self.look(data);
        self.tail = tail;
        let from = match data.len() >= KEPT {
            true => {
                self.tail.clear();
                &data[data.len() - KEPT..]
            }
            false => &[],
        };
        self.tail.extend_from_slice(from);
        let excess = self.tail.len().saturating_sub(KEPT);
        self.tail.drain(..excess);
    }

    fn look(&mut self, data: &[u8]) {
        // One search for what all of them share.
        for at in memmem::find_iter(data, b"_tokens\"") {
            for (name, part) in FIELDS {
                let end = at + b"_tokens\"".len();
                let Some(number) = data[..end].ends_with(name).then(|| number(&data[end..])).flatten() else {
                    continue;
                };
                let seen = match part {
                    Part::Prompt => &mut self.prompt,
                    Part::Output => &mut self.output,
                    Part::All => &mut self.all,
                };
                // Streams repeat it as it grows.
                *seen = number.max(*seen);
            }
        }
    }

    pub(super) fn told(&self) -> Told {
        match self.all.max(self.prompt + self.output) {
            0 if self.is_stream => Told::Guessed(self.events),
            0 => Told::Guessed((self.bytes as f64 / BYTES_A_TOKEN) as u64),
            counted => Told::Counted(counted),
        }
    }
}

/// The number after a field's name, if it is all there.
fn number(data: &[u8]) -> Option<u64> {
    let rest = data.trim_ascii_start().strip_prefix(b":")?.trim_ascii_start();
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    // What follows the last digit shows that it was the last.
    let whole = digits > 0 && digits < rest.len() && digits <= 12;
    std::str::from_utf8(&rest[..digits]).ok().filter(|_| whole)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn told(is_stream: bool, pieces: &[&[u8]]) -> Told {
        let mut usage = Usage::of_stream(is_stream);
        pieces.iter().for_each(|piece| usage.read(piece));
        usage.told()
    }

    const SAID: [(&str, u64); 5] = [
        (r#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5,"total_tokens":12}}"#, 12),
        (r#"{"usage" : {"prompt_tokens" : 7, "total_tokens" : 7 }}"#, 7),
        (r#"{"text":"x","meta_info":{"prompt_tokens":3,"completion_tokens":4,"cached_tokens":2}}"#, 7),
        (
            "event: message_start\ndata: {\"message\":{\"usage\":{\"input_tokens\":9,\"output_tokens\":1}}}\n\n\
          event: message_delta\ndata: {\"usage\":{\"output_tokens\":15}}\n\n",
            24,
        ),
        (
            "data: {\"usage\":null}\n\ndata: {\"usage\":{\"prompt_tokens\":1,\"total_tokens\":2,\"completion_tokens\":1}}\n\ndata: [DONE]\n\n",
            2,
        ),
    ];

    #[test]
    fn every_familys_own_count_is_found() {
        for (text, tokens) in SAID {
            assert_eq!(
                told(text.starts_with("data") || text.starts_with("event"), &[text.as_bytes()]),
                Told::Counted(tokens),
                "{text}"
            );
        }
    }

    #[test]
    fn text_that_speaks_of_tokens_is_not_believed() {
        let text = r#"{"text":"{\"total_tokens\":999}, \"total_tokens\": 7","my_total_tokens":3}"#;
        assert_eq!(told(false, &[text.as_bytes()]), Told::Guessed(text.len() as u64 / 4));
    }

    #[test]
    fn where_nobody_counts_events_are_tokens_else_four_bytes_are_one() {
        assert_eq!(told(true, &[b"data: 1\n\n", b"data: 2\n\ndata: [DONE]\n\n"]), Told::Guessed(3));
        assert_eq!(told(false, &[&[b'x'; 400]]), Told::Guessed(100));
        assert_eq!(told(false, &[]), Told::Guessed(0));
    }

    proptest! {
        #[test]
        fn any_cut_is_the_same(which in 0..SAID.len(), cuts in proptest::collection::vec(0usize..240, 0..8)) {
            let (text, tokens) = SAID[which];
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &text.as_bytes()[pair[0]..pair[1]]).collect();
            prop_assert_eq!(told(true, &pieces), Told::Counted(tokens));
        }
    }
}
