//! on-stream-event: whole events through their modules, one by one and at once; what no module changes passes byte
//! for byte.

use std::sync::Arc;

use axum::body::{Body, BodyDataStream};
use branchline_core::{Error, ErrorCode};
use branchline_plugins::{EventAction, Events, Module, RequestView};
use branchline_telemetry::Metrics;
use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt as _, stream};

use super::View;
use super::ending::Ending;
use crate::app::App;
use crate::http::{Family, error_event};

/// Longest event that is held until it is whole.
const EVENT_CAP: usize = 1 << 20;

/// A stream behind its modules.
struct Filter {
    upstream: BodyDataStream,
    modules: Vec<(Events, Arc<RequestView>)>,
    held: BytesMut,
    path: String,
    ending: Ending,
    metrics: Arc<Metrics>,
    over: bool,
}

/// One event: as it came, and as it reads.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Event {
    raw: Bytes,
    name: Option<String>,
    /// None for a comment.
    data: Option<String>,
}

/// The stream as its modules leave it.
pub(super) fn filter(app: &App, body: Body, modules: Vec<Arc<Module>>, view: &View) -> Body {
    let shown = |module: Arc<Module>| {
        let request = Arc::new(view.show(&module, None));
        (Events::new(module), request)
    };
    let filter = Filter {
        upstream: body.into_data_stream(),
        modules: modules.into_iter().map(shown).collect(),
        held: BytesMut::new(),
        path: view.path.clone(),
        ending: Ending::of(&view.path),
        metrics: Arc::clone(&app.metrics),
        over: false,
    };
    Body::from_stream(stream::unfold(filter, async |mut filter| {
        let item = filter.step().await?;
        Some((item, filter))
    }))
}

impl Filter {
    async fn step(&mut self) -> Option<Result<Bytes, axum::Error>> {
        while !self.over {
            let piece = match self.upstream.next().await {
                Some(Ok(piece)) => piece,
                Some(Err(error)) => {
                    self.over = true;
                    return Some(Err(error));
                }
                None => {
                    self.over = true;
                    // A last event without its empty line.
                    let rest = self.held.split().freeze();
                    let out = self.through(vec![Event::read(rest)]).await;
                    return (!out.is_empty()).then_some(Ok(out));
                }
            };
            self.held.extend_from_slice(&piece);
            let events = split(&mut self.held);
            if self.held.len() > EVENT_CAP {
                let message = format!(
                    "an event is over {EVENT_CAP} bytes, which middleware reads; ask for less output"
                );
                return Some(Ok(self.fail(&Error::new(ErrorCode::UpstreamFailed, message)).into()));
            }
            let out = self.through(events).await;
            if !out.is_empty() {
                return Some(Ok(out));
            }
        }
        None
    }

    /// What is left of these events.
    async fn through(&mut self, events: Vec<Event>) -> Bytes {
        let mut out = BytesMut::new();
        for event in events {
            let Some(data) = event.data.clone() else {
                out.extend_from_slice(&event.raw);
                continue;
            };
            self.ending.note(event.name.as_deref(), &data);
            let mut now = vec![(event.name.clone(), data)];
            let (mut changed, mut stop) = (false, false);
            for position in 0..self.modules.len() {
                let mut next = Vec::with_capacity(now.len());
                for (name, data) in std::mem::take(&mut now) {
                    match self.call(position, name.clone(), data.clone()).await {
                        Ok(EventAction::Continue) => next.push((name, data)),
                        Ok(EventAction::Replace(new)) => {
                            changed = true;
                            next.extend(new.into_iter().map(|event| (event.name, event.data)));
                        }
                        Ok(EventAction::Stop(new)) => {
                            (changed, stop) = (true, true);
                            next.extend(self.ending.last(new, &data));
                            break;
                        }
                        Err(error) => {
                            out.extend_from_slice(&self.fail(&error));
                            return out.freeze();
                        }
                    }
                }
                now = next;
            }
            match changed {
                false => out.extend_from_slice(&event.raw),
                true => now.iter().for_each(|(name, data)| write(&mut out, name.as_deref(), data)),
            }
            if stop {
                self.end();
                if let Some((name, data)) = self.ending.mark(&now) {
                    write(&mut out, name.as_deref(), &data);
                }
                break;
            }
        }
        out.freeze()
    }

    async fn call(
        &mut self,
        position: usize,
        name: Option<String>,
        data: String,
    ) -> Result<EventAction, Error> {
        let Some((events, request)) = self.modules.get_mut(position) else {
            return Ok(EventAction::Continue);
        };
        let hook = branchline_plugins::Hook::OnStreamEvent;
        let module = Arc::clone(events.module());
        if module.is_quarantined() {
            module.count_quarantined(hook);
            return match module.fails_open() {
                true => Ok(EventAction::Continue),
                false => {
                    let message =
                        format!("middleware '{}' is quarantined; tell the operator", module.spec.name);
                    Err(Error::new(ErrorCode::Unavailable, message))
                }
            };
        }
        match events.event(request, name, data).await.result {
            Ok(action) => Ok(action),
            Err(_) if module.fails_open() => Ok(EventAction::Continue),
            Err(failure) => Err(failure.refusal(&module.spec.name)),
        }
    }

    /// Ends the stream in one error event: no end mark, nothing of what was held.
    fn fail(&mut self, error: &Error) -> BytesMut {
        self.end();
        self.metrics.errors.with([error.code.name()]).inc();
        let mut out = BytesMut::new();
        out.extend_from_slice(&error_event(Family::of(&self.path), error));
        out
    }

    /// Lets the worker's answer go, which cancels it.
    fn end(&mut self) {
        self.over = true;
        self.upstream = Body::empty().into_data_stream();
        self.held.clear();
    }
}

fn write(out: &mut BytesMut, name: Option<&str>, data: &str) {
    if let Some(name) = name {
        out.extend_from_slice(format!("event: {name}\n").as_bytes());
    }
    for line in data.split('\n') {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(line.as_bytes());
        out.extend_from_slice(b"\n");
    }
    out.extend_from_slice(b"\n");
}

/// Takes the whole events out of `held`. Lines end in LF, CRLF or CR; an empty line ends an event.
fn split(held: &mut BytesMut) -> Vec<Event> {
    let mut events = Vec::new();
    let (mut line_start, mut at) = (0, 0);
    while at < held.len() {
        let ending = match held[at] {
            b'\n' => 1,
            // Whether a line feed follows is only known with the next byte.
            b'\r' if at + 1 == held.len() => break,
            b'\r' if held[at + 1] == b'\n' => 2,
            b'\r' => 1,
            _ => {
                at += 1;
                continue;
            }
        };
        let empty = at == line_start;
        at += ending;
        line_start = at;
        if empty {
            events.push(Event::read(held.split_to(at).freeze()));
            (line_start, at) = (0, 0);
        }
    }
    events
}

impl Event {
    fn read(raw: Bytes) -> Self {
        let text = String::from_utf8_lossy(&raw);
        let (mut name, mut data) = (None, None::<String>);
        for line in text.split(['\n', '\r']) {
            let (field, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match field {
                "event" => name = Some(value.to_owned()),
                "data" => match &mut data {
                    Some(data) => {
                        data.push('\n');
                        data.push_str(value);
                    }
                    None => data = Some(value.to_owned()),
                },
                _ => {}
            }
        }
        Self { raw, name, data }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(text: &str, at: usize) -> Vec<Event> {
        let mut held = BytesMut::new();
        let mut events = Vec::new();
        for piece in text.as_bytes().chunks(at) {
            held.extend_from_slice(piece);
            events.extend(split(&mut held));
        }
        // A carriage return at the very end may still get its line feed.
        events
    }

    #[test]
    fn events_are_whole_in_any_cut_and_with_any_line_end() {
        for end in ["\n", "\r\n"] {
            let text = format!(
                ": hello{end}{end}data: a{end}data:  b{end}{end}event: x{end}data: {{\"t\":\"é\"}}{end}{end}data: [DONE]{end}{end}"
            );
            for at in 1..text.len() {
                let events = cut(&text, at);
                let data: Vec<_> = events.iter().map(|event| event.data.as_deref()).collect();
                assert_eq!(data, [None, Some("a\n b"), Some("{\"t\":\"é\"}"), Some("[DONE]")], "cut at {at}");
                assert_eq!(events[2].name.as_deref(), Some("x"));
                let raw: Vec<u8> = events.iter().flat_map(|event| event.raw.to_vec()).collect();
                assert_eq!(raw, text.as_bytes());
            }
        }
    }

    #[test]
    fn data_with_line_ends_is_written_as_several_lines() {
        let mut out = BytesMut::new();
        write(&mut out, Some("x"), "a\nb");
        assert_eq!(out, "event: x\ndata: a\ndata: b\n\n");
    }
}
