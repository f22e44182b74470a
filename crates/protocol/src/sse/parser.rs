//! Bytes in, whole events out. LF, CRLF and CR end lines, wherever the network cuts; a half event is withheld.

use bytes::Bytes;

/// One event.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Event {
    /// The `event` field, if any.
    pub name: Option<String>,
    /// The `id` field, if any.
    pub id: Option<String>,
    /// The `data` lines, joined by LF.
    pub data: Bytes,
}

impl Event {
    /// Whether this is the end mark of an OpenAI-shaped stream.
    pub fn is_done(&self) -> bool {
        self.data.trim_ascii() == b"[DONE]"
    }
}

/// What the parser found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// A whole event with at least one `data` line.
    Event(Event),
    /// A comment line, without its colon and blank.
    Comment(Bytes),
}

/// An event is larger than the parser's bound; the stream cannot be followed further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an event is larger than {limit} bytes")]
pub struct TooLong {
    /// The bound.
    pub limit: usize,
}

/// Cuts a byte stream into events.
#[derive(Debug)]
pub struct Parser {
    limit: usize,
    line: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
    name: Option<String>,
    id: Option<String>,
    after_cr: bool,
    at_start: bool,
}

impl Parser {
    /// A parser that refuses events over `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            line: Vec::new(),
            data: Vec::new(),
            has_data: false,
            name: None,
            id: None,
            after_cr: false,
            at_start: true,
        }
    }

    /// Feeds bytes and appends what became whole to `out`.
    ///
    /// # Errors
    /// [`TooLong`] once an event passes the bound; what came before it is in `out`.
    pub fn push(&mut self, mut bytes: &[u8], out: &mut Vec<Item>) -> Result<(), TooLong> {
        while !bytes.is_empty() {
            if std::mem::take(&mut self.after_cr) && bytes[0] == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let Some(end) = memchr::memchr2(b'\n', b'\r', bytes) else {
                return self.hold(bytes);
            };
            self.hold(&bytes[..end])?;
            self.after_cr = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            self.line(out);
        }
        Ok(())
    }

    /// Whether bytes of an unfinished event are held.
    pub fn is_mid_event(&self) -> bool {
        !self.line.is_empty() || self.has_data
    }

    fn hold(&mut self, bytes: &[u8]) -> Result<(), TooLong> {
        if self.line.len() + self.data.len() + bytes.len() > self.limit {
            return Err(TooLong { limit: self.limit });
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    fn line(&mut self, out: &mut Vec<Item>) {
        let line = std::mem::take(&mut self.line);
        let mut rest = line.as_slice();
        if std::mem::take(&mut self.at_start) {
            rest = rest.strip_prefix(b"\xef\xbb\xbf").unwrap_or(rest);
        }
        if rest.is_empty() {
            return self.dispatch(out);
        }
        let (field, value) = match memchr::memchr(b':', rest) {
            Some(colon) => (&rest[..colon], &rest[colon + 1..]),
            None => (rest, &[][..]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match field {
            b"" => out.push(Item::Comment(Bytes::copy_from_slice(value))),
            b"data" => {
                if self.has_data {
                    self.data.push(b'\n');
                }
                self.has_data = true;
                self.data.extend_from_slice(value);
            }
            b"event" => self.name = Some(String::from_utf8_lossy(value).into_owned()),
            b"id" => self.id = Some(String::from_utf8_lossy(value).into_owned()),
            _ => {}
        }
    }

    fn dispatch(&mut self, out: &mut Vec<Item>) {
        let (name, id) = (self.name.take(), self.id.take());
        if std::mem::take(&mut self.has_data) {
            let data = std::mem::take(&mut self.data).into();
            out.push(Item::Event(Event { name, id, data }));
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
