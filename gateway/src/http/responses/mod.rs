//! The Responses API: create (whole, as events, or in the background), and what is stored of it.

mod output;
mod stored;

pub use stored::ResponseStore;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::{get, post};
use branchline_core::{Error, ErrorCode, Result};
use branchline_protocol::responses::{ResponsesRequest, message_of};
use futures_util::StreamExt as _;
use http::{Request, StatusCode};
use serde_json::{Value, json};

use super::answer::json as reply;
use super::gather::Gathered;
use super::intake::{Intake, answer};
use super::speech::Speaker;
use super::stream::{Family, Out, respond};
use super::turn::{self, Turn};
use crate::app::App;
use crate::dispatch::{self, Batch, Item, Running};
use crate::guard::Permit;
use output::{Output, Status};
use stored::Kept;

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/responses", post(handle))
        .route("/v1/responses/{id}", get(stored::show).delete(stored::forget))
        .route("/v1/responses/{id}/cancel", post(stored::cancel))
        .route("/v1/responses/{id}/input_items", get(stored::input_items))
}

async fn handle(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    answer(app, request, serve).await
}

async fn serve(intake: Intake) -> Result<Response> {
    let mut request = ResponsesRequest::read(&intake.fields(), intake.limits())?;
    let before = match &request.previous {
        Some(id) => intake.app.responses.conversation(id, &intake.tenant)?,
        None => Vec::new(),
    };
    let own: Vec<Value> = request.items.iter().filter_map(message_of).collect();
    let conversation = [before, own].concat();
    let mut messages = conversation.clone();
    if let Some(text) = &request.instructions {
        messages.insert(0, json!({"role": "system", "content": text}));
    }
    if messages.is_empty() {
        return Err(Error::invalid("input", "`input` holds nothing that a model reads; send a message"));
    }
    request.chat.input.messages = Value::Array(messages);
    let stream = request.chat.delivery.stream;
    let named = request.chat.rid.is_some();
    let Turn { mut head, jobs, speakers, gathered } =
        turn::begin(&intake, request.chat, ResponsesRequest::FIT, "resp_").await?;
    if named {
        // What is stored is found by this id: a client's own name would take the place of another answer.
        head.id = format!("resp_{}", uuid::Uuid::new_v4().simple());
    }
    let output = Output::new(&head, request.echo);
    let kept = request.store.then(|| Kept::new(intake.tenant.clone(), request.items, conversation));
    let (app, permit) = (Arc::clone(&intake.app), intake.permit.clone());
    let run = Run { app, output, speakers, gathered, kept, _permit: permit };
    if stream {
        return respond(&intake.app, jobs, Events { run, begun: false }).await;
    }
    if request.background {
        return Ok(run.in_background(jobs));
    }
    run.whole(jobs).await
}

/// One response on its way.
struct Run {
    app: Arc<App>,
    output: Output,
    speakers: Vec<Speaker>,
    gathered: Gathered,
    kept: Option<Kept>,
    /// In the background it outlives the answer.
    _permit: Option<Arc<Permit>>,
}

impl Run {
    fn take(&mut self, mut item: Item, emit: &mut output::Emit<'_>) -> Result<()> {
        let said = self.speakers[item.sequence].read(&mut item.piece)?;
        self.gathered.count(&item);
        said.into_iter().try_for_each(|one| self.output.say(one, emit))
    }

    /// Closes what is open and says how it ended; keeps it if it is to be kept.
    fn end(&mut self, emit: &mut output::Emit<'_>) -> Result<Value> {
        let end = self.gathered.sequences.first().and_then(|sequence| sequence.end.as_ref());
        let status = Status::of(end);
        self.output.close(status, emit)?;
        let reasoning = self.speakers.iter().map(Speaker::reasoning_tokens).sum();
        let response = self.output.describe(status, Some((&self.gathered.usage(), reasoning)));
        self.keep(&response);
        Ok(response)
    }

    fn keep(&mut self, response: &Value) {
        if let Some(kept) = self.kept.take() {
            self.app.responses.put(kept.with(response.clone(), None));
        }
    }

    async fn whole(mut self, jobs: Vec<Running>) -> Result<Response> {
        let mut batch = Batch::new(jobs);
        while let Some(item) = batch.next().await {
            self.take(item?, &mut |_, _| Ok(()))?;
        }
        let response = self.end(&mut |_, _| Ok(()))?;
        Ok(reply(StatusCode::OK, &response))
    }

    /// Answers at once; the work goes on until it ends, is cancelled, or the gateway stops.
    fn in_background(mut self, jobs: Vec<Running>) -> Response {
        let (app, cancel) = (Arc::clone(&self.app), self.app.stop.child_token());
        let started = self.output.describe(Status::InProgress, None);
        if let Some(kept) = &mut self.kept {
            app.responses.put(kept.clone().with(started.clone(), Some(cancel.clone())));
            kept.again = true;
        }
        app.tracker.spawn(async move {
            let outcome = tokio::select! {
                () = cancel.cancelled() => Ok(Status::Cancelled),
                outcome = self.finish(jobs) => outcome.map(|()| Status::Completed),
            };
            self.settle(outcome);
        });
        reply(StatusCode::OK, &started)
    }

    async fn finish(&mut self, jobs: Vec<Running>) -> Result<()> {
        let mut batch = Batch::new(jobs);
        while let Some(item) = batch.next().await {
            self.take(item?, &mut |_, _| Ok(()))?;
        }
        self.end(&mut |_, _| Ok(())).map(drop)
    }

    /// A background response that did not end by itself.
    fn settle(&mut self, outcome: Result<Status>) {
        let response = match outcome {
            Ok(Status::Cancelled) => self.output.describe(Status::Cancelled, None),
            Ok(_) => return,
            Err(error) => {
                dispatch::failed(&self.app.metrics, &error);
                self.output.failure(&error)
            }
        };
        self.keep(&response);
    }
}

/// A response as events.
struct Events {
    run: Run,
    begun: bool,
}

impl Events {
    fn begin(&mut self, out: &mut Out) -> Result<()> {
        if std::mem::replace(&mut self.begun, true) {
            return Ok(());
        }
        for kind in ["response.created", "response.in_progress"] {
            let response = self.run.output.describe(Status::InProgress, None);
            let event = self.run.output.event(kind, json!({"response": response}));
            out.named(kind, &event)?;
        }
        Ok(())
    }
}

impl Family for Events {
    fn piece(&mut self, item: Item, out: &mut Out) -> Result<()> {
        self.begin(out)?;
        self.run.take(item, &mut |kind, event| out.named(kind, &event))
    }

    fn finish(&mut self, out: &mut Out) -> Result<()> {
        self.begin(out)?;
        let response = self.run.end(&mut |kind, event| out.named(kind, &event))?;
        let kind = match response["status"].as_str() {
            Some("incomplete") => "response.incomplete",
            Some("failed") => "response.failed",
            _ => "response.completed",
        };
        let event = self.run.output.event(kind, json!({"response": response}));
        out.named(kind, &event)
    }

    fn fail(&mut self, error: &Error, out: &mut Out) {
        let response = self.run.output.failure(error);
        self.run.keep(&response);
        let event = self.run.output.event("response.failed", json!({"response": response}));
        // Values always serialise.
        let _ = out.named("response.failed", &event);
    }
}

fn not_stored(id: &str) -> Error {
    let message =
        format!("response {id:?} is not stored here; it may be of another gateway, deleted, or too old");
    Error::new(ErrorCode::NotFound, message).with_field("response_id")
}
