//! Events as bytes. Each call yields one whole event, blank line included.

use bytes::Bytes;
use serde::Serialize;

/// The end mark of OpenAI-shaped streams.
pub const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

/// What is sent while there is nothing to send.
pub const KEEP_ALIVE: Bytes = Bytes::from_static(b": keep-alive\n\n");

/// An event of a JSON value. JSON never holds a raw line break, so one `data` line is enough.
///
/// # Errors
/// Whatever serde reports, for example a map with keys that are no strings.
pub fn json(value: &impl Serialize) -> Result<Bytes, serde_json::Error> {
    let mut out = Vec::with_capacity(256);
    out.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut out, value)?;
    out.extend_from_slice(b"\n\n");
    Ok(out.into())
}

/// An event with a name, as [`json`].
///
/// # Errors
/// As [`json`].
pub fn named(event: &str, value: &impl Serialize) -> Result<Bytes, serde_json::Error> {
    let mut out = Vec::with_capacity(256);
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(event.as_bytes());
    out.push(b'\n');
    out.extend_from_slice(&json(value)?);
    Ok(out.into())
}

/// An event of any text; each line becomes a `data` line.
pub fn data(text: &str) -> Bytes {
    let mut out = Vec::with_capacity(text.len() + 16);
    for line in text.replace("\r\n", "\n").split(['\n', '\r']) {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(line.as_bytes());
        out.push(b'\n');
    }
    out.push(b'\n');
    out.into()
}

/// A comment, which clients skip.
pub fn comment(text: &str) -> Bytes {
    format!(": {}\n\n", text.replace(['\n', '\r'], " ")).into()
}
