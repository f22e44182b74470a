//! Where HTTP/1 messages begin and end in a client's bytes, and which heads are refused for being readable in two ways.
//!
//! A proxy before us that reads a head otherwise than we do lets one client's bytes become another's request. So what
//! has two readings is refused before anything parses it. Pure: no I/O.

/// What a client's head does wrong, as a word for the answer's path and as a sentence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A line ends in LF alone, or a CR stands alone.
    BareLineEnd,
    /// `content-length` and `transfer-encoding` together.
    TwoLengths,
    /// `content-length` that is repeated or no plain number.
    BadLength,
    /// `transfer-encoding` other than `chunked`, or in HTTP/1.0.
    BadEncoding,
    /// No `host`, several, or one that is none.
    BadHost,
    /// A header line that is folded, or has a blank before its colon, or no name.
    BadHeader,
    /// A chunk whose size or end is malformed.
    BadChunk,
}

impl Fault {
    const ALL: [Self; 7] = [
        Self::BareLineEnd,
        Self::TwoLengths,
        Self::BadLength,
        Self::BadEncoding,
        Self::BadHost,
        Self::BadHeader,
        Self::BadChunk,
    ];

    fn word(self) -> &'static str {
        match self {
            Self::BareLineEnd => "bare-line-end",
            Self::TwoLengths => "two-lengths",
            Self::BadLength => "bad-length",
            Self::BadEncoding => "bad-encoding",
            Self::BadHost => "bad-host",
            Self::BadHeader => "bad-header",
            Self::BadChunk => "bad-chunk",
        }
    }

    /// For the client.
    pub fn message(self) -> &'static str {
        match self {
            Self::BareLineEnd => "a line of the request's head does not end in CR LF; end each line so",
            Self::TwoLengths => "content-length and transfer-encoding are both given; send one of them",
            Self::BadLength => "content-length is repeated or no number; send it once, in digits",
            Self::BadEncoding => {
                "transfer-encoding is not read here unless it is 'chunked' in HTTP/1.1; send content-length"
            }
            Self::BadHost => "host is missing, repeated or no host; send it once, as host or host:port",
            Self::BadHeader => {
                "a header line is folded, lacks its name or has a blank before its colon; send 'name: value'"
            }
            Self::BadChunk => "a chunk of the body has no readable size or end; frame it as HTTP/1.1 says",
        }
    }

    /// A request that stands in the place of the refused one, so that its answer comes in order.
    pub(super) fn stand_in(self) -> Vec<u8> {
        format!("GET {REFUSED}{} HTTP/1.1\r\nhost: refused\r\nconnection: close\r\n\r\n", self.word())
            .into_bytes()
    }

    /// The fault that a stand-in's path tells. A client that asks for the path by itself is refused as well.
    pub fn of_path(path: &str) -> Option<Self> {
        let word = path.strip_prefix(REFUSED)?;
        Self::ALL.into_iter().find(|fault| fault.word() == word)
    }
}

const REFUSED: &str = "/.refused/";
/// What an HTTP/2 client begins with.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Longest line of a chunk's size, extensions included.
const CHUNK_LINE: usize = 256;
/// Longest chunk size in hex digits.
const CHUNK_DIGITS: usize = 15;

/// What comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// The connection's first bytes.
    Start,
    /// A request's head.
    Head,
    /// This many bytes of a body.
    Body(u64),
    /// A chunk's size line.
    ChunkSize,
    /// This many bytes of a chunk, and its CR LF.
    ChunkData(u64),
    /// Lines after the last chunk.
    Trailers,
    /// Anything: HTTP/2 frames itself.
    Opaque,
}

/// Follows one connection.
#[derive(Debug)]
pub(super) struct Framing {
    part: Part,
    /// Bytes of the head that have been looked at.
    seen: usize,
    /// Longest head that is held until it is whole; a longer one is left to the parser, which refuses it.
    most: usize,
}

impl Framing {
    pub(super) fn new(most: usize) -> Self {
        Self { part: Part::Start, seen: 0, most }
    }

    /// Whether the next bytes begin or end a head: they are to come soon.
    pub(super) fn in_head(&self) -> bool {
        matches!(self.part, Part::Start | Part::Head)
    }

    /// Bytes that may pass unseen; `None` for all.
    pub(super) fn unseen(&self) -> Option<u64> {
        match self.part {
            Part::Opaque => None,
            Part::Body(left) => Some(left),
            Part::ChunkData(left) => Some(left.saturating_sub(2)),
            _ => Some(0),
        }
    }

    /// Counts bytes that passed unseen.
    pub(super) fn passed(&mut self, count: u64) {
        match &mut self.part {
            Part::Body(left) => {
                *left -= count.min(*left);
                if *left == 0 {
                    self.part = Part::Head;
                }
            }
            Part::ChunkData(left) => *left -= count.min(*left),
            _ => {}
        }
    }

    /// How many of `bytes` are known to be good and may be handed on; 0 asks for more.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<usize, Fault> {
        match self.part {
            Part::Opaque => Ok(bytes.len()),
            Part::Start => self.start(bytes),
            Part::Head => self.head(bytes),
            Part::Body(left) => {
                let count = left.min(bytes.len() as u64);
                self.passed(count);
                Ok(count as usize)
            }
            Part::ChunkSize => self.chunk_size(bytes),
            Part::ChunkData(2) => match bytes {
                [b'\r', b'\n', ..] => {
                    self.part = Part::ChunkSize;
                    Ok(2)
                }
                [] | [b'\r'] => Ok(0),
                _ => Err(Fault::BadChunk),
            },
            Part::ChunkData(left) => {
                let count = (left - 2).min(bytes.len() as u64);
                self.passed(count);
                Ok(count as usize)
            }
            Part::Trailers => self.trailers(bytes),
        }
    }

    fn start(&mut self, bytes: &[u8]) -> Result<usize, Fault> {
        let length = bytes.len().min(PREFACE.len());
        if bytes[..length] != PREFACE[..length] {
            self.part = Part::Head;
            return self.head(bytes);
        }
        if length < PREFACE.len() {
            return Ok(0);
        }
        self.part = Part::Opaque;
        Ok(bytes.len())
    }

    fn head(&mut self, bytes: &[u8]) -> Result<usize, Fault> {
        // Empty lines before a request are allowed, and passed over by the parser.
        if bytes.starts_with(b"\r\n") {
            return Ok(2);
        }
        let from = self.seen.saturating_sub(3);
        for at in memchr::memchr_iter(b'\n', &bytes[from..]).map(|at| from + at) {
            if at == 0 || bytes[at - 1] != b'\r' {
                return Err(Fault::BareLineEnd);
            }
            if at >= 3 && bytes[at - 3..at] == *b"\r\n\r" {
                self.seen = 0;
                self.part = judge(&bytes[..=at])?;
                return Ok(at + 1);
            }
        }
        self.seen = bytes.len();
        if bytes.len() > self.most {
            // The parser answers what is too long, and ends the connection.
            self.part = Part::Opaque;
            return Ok(bytes.len());
        }
        Ok(0)
    }

    fn chunk_size(&mut self, bytes: &[u8]) -> Result<usize, Fault> {
        let Some(end) = memchr::memchr(b'\n', bytes) else {
            return if bytes.len() > CHUNK_LINE { Err(Fault::BadChunk) } else { Ok(0) };
        };
        let line = bytes[..end].strip_suffix(b"\r").ok_or(Fault::BadChunk)?;
        let digits = line.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii_end();
        let plain =
            !digits.is_empty() && digits.len() <= CHUNK_DIGITS && digits.iter().all(u8::is_ascii_hexdigit);
        if !plain || line.len() > CHUNK_LINE || line.contains(&b'\r') {
            return Err(Fault::BadChunk);
        }
        let size = std::str::from_utf8(digits).ok().and_then(|text| u64::from_str_radix(text, 16).ok());
        self.part = match size.ok_or(Fault::BadChunk)? {
            0 => Part::Trailers,
            size => Part::ChunkData(size + 2),
        };
        Ok(end + 1)
    }

    fn trailers(&mut self, bytes: &[u8]) -> Result<usize, Fault> {
        let Some(end) = memchr::memchr(b'\n', bytes) else {
            return if bytes.len() > self.most { Err(Fault::BadChunk) } else { Ok(0) };
        };
        let line = bytes[..end].strip_suffix(b"\r").ok_or(Fault::BareLineEnd)?;
        if line.is_empty() {
            self.part = Part::Head;
        }
        Ok(end + 1)
    }
}

/// What follows a whole head, or why it is refused.
fn judge(head: &[u8]) -> Result<Part, Fault> {
    let mut lines = head[..head.len() - 4].split(|byte| *byte == b'\n');
    let first = lines.next().unwrap_or_default();
    let old = first.trim_ascii_end().ends_with(b"HTTP/1.0");
    let (mut length, mut chunked, mut hosts) = (None, false, 0);
    for line in std::iter::once(first.strip_suffix(b"\r").unwrap_or(first)).chain(lines.clone()) {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if memchr::memchr(b'\r', line).is_some() {
            return Err(Fault::BareLineEnd);
        }
    }
    for line in lines {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let colon = memchr::memchr(b':', line).ok_or(Fault::BadHeader)?;
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        if name.is_empty() || name.iter().any(|byte| byte.is_ascii_whitespace()) {
            return Err(Fault::BadHeader);
        }
        if name.eq_ignore_ascii_case(b"content-length") {
            let digits = !value.is_empty() && value.len() < 19 && value.iter().all(u8::is_ascii_digit);
            let read = std::str::from_utf8(value).ok().filter(|_| digits).and_then(|text| text.parse().ok());
            let read: u64 = read.ok_or(Fault::BadLength)?;
            if length.replace(read).is_some() {
                return Err(Fault::BadLength);
            }
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            if chunked || old || !value.eq_ignore_ascii_case(b"chunked") {
                return Err(Fault::BadEncoding);
            }
            chunked = true;
        } else if name.eq_ignore_ascii_case(b"host") {
            hosts += 1;
            let good = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~:[]%!$&'()*+;=".contains(byte);
            if value.is_empty() || !value.iter().all(good) {
                return Err(Fault::BadHost);
            }
        }
    }
    match (hosts, old) {
        (1, _) | (0, true) => {}
        _ => return Err(Fault::BadHost),
    }
    match (length, chunked) {
        (Some(_), true) => Err(Fault::TwoLengths),
        (None, true) => Ok(Part::ChunkSize),
        (Some(0) | None, false) => Ok(Part::Head),
        (Some(length), false) => Ok(Part::Body(length)),
    }
}

#[cfg(test)]
mod tests;
