//! What a scripted worker answers.

use std::time::Duration;

use bytes::Bytes;

/// One thing a worker does while answering.
#[derive(Debug, Clone)]
pub(super) enum Step {
    /// Sends these bytes as one chunk.
    Chunk(Bytes),
    /// Sends the chunk so many times.
    Repeat(Bytes, usize),
    /// Sends bytes as they are, outside the framing.
    Raw(Bytes),
    /// Does nothing for so long.
    Wait(Duration),
    /// Resets the connection.
    Reset,
    /// Closes the connection without ending the body.
    Cut,
    /// Keeps the connection open and silent until the client goes.
    Hold,
}

/// A script. Without `body` it is sent in chunks, and ended properly unless the last step says otherwise.
#[derive(Debug, Clone)]
pub struct Reply {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, String)>,
    /// A body of known length, in place of steps.
    pub(super) body: Option<Bytes>,
    pub(super) steps: Vec<Step>,
    /// Steps before the head.
    pub(super) delay: Vec<Step>,
}

impl Reply {
    /// An answer with this status.
    pub fn new(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: None, steps: Vec::new(), delay: Vec::new() }
    }

    /// A 200 with `text/event-stream`.
    pub fn events() -> Self {
        Self::new(200).header("content-type", "text/event-stream")
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The whole body, sent with its length.
    #[must_use]
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = Some(body.into());
        self
    }

    /// Waits before the head.
    #[must_use]
    pub fn after(mut self, wait: Duration) -> Self {
        self.delay.push(Step::Wait(wait));
        self
    }

    /// Resets the connection instead of answering.
    #[must_use]
    pub fn never(mut self) -> Self {
        self.delay.push(Step::Reset);
        self
    }

    /// Keeps the connection open without answering.
    #[must_use]
    pub fn silent(mut self) -> Self {
        self.delay.push(Step::Hold);
        self
    }

    /// Sends one chunk.
    #[must_use]
    pub fn chunk(self, bytes: impl Into<Bytes>) -> Self {
        self.step(Step::Chunk(bytes.into()))
    }

    /// Sends the same chunk `times` times, as fast as it is taken.
    #[must_use]
    pub fn repeat(self, bytes: impl Into<Bytes>, times: usize) -> Self {
        self.step(Step::Repeat(bytes.into(), times))
    }

    /// Sends bytes outside the framing.
    #[must_use]
    pub fn raw(self, bytes: impl Into<Bytes>) -> Self {
        self.step(Step::Raw(bytes.into()))
    }

    /// Does nothing for so long.
    #[must_use]
    pub fn wait(self, wait: Duration) -> Self {
        self.step(Step::Wait(wait))
    }

    /// Resets the connection.
    #[must_use]
    pub fn reset(self) -> Self {
        self.step(Step::Reset)
    }

    /// Closes the connection without ending the body.
    #[must_use]
    pub fn cut(self) -> Self {
        self.step(Step::Cut)
    }

    /// Keeps the connection open and silent until the client goes.
    #[must_use]
    pub fn hold(self) -> Self {
        self.step(Step::Hold)
    }

    fn step(mut self, step: Step) -> Self {
        self.steps.push(step);
        self
    }

    pub(super) fn head(&self) -> String {
        use std::fmt::Write as _;
        let mut head = format!("HTTP/1.1 {} Scripted\r\n", self.status);
        for (name, value) in &self.headers {
            let _ = write!(head, "{name}: {value}\r\n");
        }
        match &self.body {
            Some(body) => {
                let _ = write!(head, "content-length: {}\r\n\r\n", body.len());
            }
            None => head.push_str("transfer-encoding: chunked\r\n\r\n"),
        }
        head
    }
}
