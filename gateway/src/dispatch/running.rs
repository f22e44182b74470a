//! One job on its way: the attempt, one retry elsewhere before the first piece, silence limits, the end.
//!
//! Dropping a [`Running`] drops the worker's stream, which cancels the request there at once.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use branchline_core::{Error, ErrorCode, Result, WorkerId};
use branchline_worker::{DeltaStream, RouteQuery, SubmitOptions, Transport};
use futures_util::Stream;
use tokio::time::Sleep;

use super::contract::cache_key;
use super::observe::Observer;
use super::piece::nonsense;
use super::{Job, JobLease, Piece};
use crate::app::App;

/// Attempts of one job, the first included.
const ATTEMPTS: usize = 2;
/// What a client is told to wait if nobody knows better.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A job that a worker has taken.
pub struct Running {
    app: Arc<App>,
    job: Job,
    observer: Observer,
    stream: DeltaStream,
    /// Workers that had their attempt, the present one last.
    tried: Vec<WorkerId>,
    arrived: Instant,
    /// Whether a piece has come: from then on the answer is this worker's.
    begun: bool,
    /// Sequences that have not ended.
    open: u32,
    over: bool,
    /// Armed while the worker is silent.
    silence: Option<Pin<Box<Sleep>>>,
}

/// Chooses a worker and hands it the job.
///
/// # Errors
/// `Cancelled` if the job was aborted meanwhile, `Unavailable` if no worker can take it, or the worker's refusal.
pub fn start(app: &Arc<App>, job: Job, arrived: Instant) -> Result<Running> {
    let observer = Observer::new(Arc::clone(&app.metrics));
    let mut tried = Vec::new();
    let stream = loop {
        match attempt(app, &job, &observer, &mut tried, arrived) {
            Ok(stream) => break stream,
            Err(error) if may_move(app, &job, &error) && (1..ATTEMPTS).contains(&tried.len()) => {
                observer.retried(&error)
            }
            Err(error) => return Err(with_wait(error)),
        }
    };
    let open = job.sampling.sequences();
    Ok(Running {
        app: Arc::clone(app),
        job,
        observer,
        stream,
        tried,
        arrived,
        begun: false,
        open,
        over: false,
        silence: None,
    })
}

fn attempt(
    app: &App,
    job: &Job,
    observer: &Observer,
    tried: &mut Vec<WorkerId>,
    arrived: Instant,
) -> Result<DeltaStream> {
    if job.live.is_aborted() {
        return Err(Error::new(ErrorCode::Cancelled, "the request was aborted before a worker had it"));
    }
    let query = RouteQuery {
        token_ids: &job.tokens,
        namespace: cache_key(&job.routing),
        exclude: tried,
        transport: Some(Transport::Grpc),
        engine_id: job.lease.as_ref().and_then(JobLease::engine_id),
        ..RouteQuery::default()
    };
    let choice = app.fleet.choose(Some(&job.model.name), &query)?;
    observer.chosen(choice.predicted_cached_tokens);
    tried.push(choice.worker.id);
    job.live.moved_to(&choice.worker);
    let deadline = app.options.request_timeout.map(|limit| limit.saturating_sub(arrived.elapsed()));
    choice.worker.submit(
        job.request(),
        SubmitOptions { deadline, guard: Some(choice.guard), ..SubmitOptions::default() },
    )
}

/// Whether the job may be tried elsewhere. While its lease's worker lives, a full queue there is waited for: what the
/// lease promises is only to be had there.
fn may_move(app: &App, job: &Job, error: &Error) -> bool {
    let pinned = || {
        let engine = job.lease.as_ref().and_then(JobLease::engine_id);
        engine.is_some_and(|engine| app.fleet.engine(engine).is_some())
    };
    is_movable(error) && !(error.code == ErrorCode::ResourceExhausted && pinned())
}

/// Whether another worker may do better; what is wrong with the request itself is wrong everywhere.
fn is_movable(error: &Error) -> bool {
    matches!(error.code, ErrorCode::UpstreamFailed | ErrorCode::Unavailable | ErrorCode::ResourceExhausted)
}

fn with_wait(error: Error) -> Error {
    match error.retry_after {
        None if is_movable(&error) => error.with_retry_after(RETRY_AFTER),
        _ => error,
    }
}

impl Running {
    /// The job.
    pub fn job(&self) -> &Job {
        &self.job
    }

    fn accept(&mut self, piece: &mut Piece) {
        if let (Some(found), Some(lease)) = (&mut piece.lease, &self.job.lease)
            && let Some(name) = &found.name
        {
            found.id = Some(self.app.leases.sign(name, &lease.tenant));
        }
        self.begun = true;
        self.silence = None;
        if let Some(found) = piece.prompt {
            self.observer.prompt(found);
        }
        if let Some(end) = &piece.end {
            self.observer.completion(end.completion_tokens);
            self.open = self.open.saturating_sub(1);
            self.over = self.open == 0;
        }
    }

    /// Tries elsewhere, or gives up with the error that the client shall see.
    fn fail(&mut self, error: Error) -> Result<()> {
        self.silence = None;
        if self.begun || !may_move(&self.app, &self.job, &error) || self.tried.len() >= ATTEMPTS {
            self.over = true;
            return Err(if self.begun { error } else { with_wait(error) });
        }
        match attempt(&self.app, &self.job, &self.observer, &mut self.tried, self.arrived) {
            Ok(stream) => {
                self.observer.retried(&error);
                tracing::warn!(request = %self.job.live.id(), %error, "request moved to another worker");
                self.stream = stream;
                Ok(())
            }
            // That there is no other worker is no news; what happened to the first is.
            Err(_) => {
                self.over = true;
                Err(with_wait(error))
            }
        }
    }

    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<Error> {
        let options = &self.app.options;
        let limit = if self.begun { options.idle_timeout } else { options.first_token_timeout };
        let Some(limit) = limit else { return Poll::Pending };
        let silence = self.silence.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        std::task::ready!(silence.as_mut().poll(cx));
        let message = format!("the worker was silent for {limit:?}; try again");
        Poll::Ready(Error::new(ErrorCode::DeadlineExceeded, message))
    }
}

impl Stream for Running {
    type Item = Result<Piece>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            if this.over {
                return Poll::Ready(None);
            }
            let error = match Pin::new(&mut this.stream).poll_next(cx) {
                Poll::Ready(Some(Ok(delta))) => match Piece::read(delta) {
                    Ok(piece) if piece.index >= this.job.sampling.sequences() => {
                        nonsense("a sequence was not asked for")
                    }
                    Ok(mut piece) => {
                        this.accept(&mut piece);
                        return Poll::Ready(Some(Ok(piece)));
                    }
                    Err(error) => error,
                },
                Poll::Ready(Some(Err(error))) => error,
                Poll::Ready(None) => {
                    Error::new(ErrorCode::UpstreamFailed, "the worker ended the answer early; try again")
                }
                Poll::Pending => std::task::ready!(this.poll_silence(cx)),
            };
            if let Err(error) = this.fail(error) {
                return Poll::Ready(Some(Err(error)));
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.over {
            self.observer.abandoned(self.app.stop.is_cancelled());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_failures_of_a_worker_are_moved_and_get_a_wait() {
        for code in ErrorCode::ALL {
            let movable = matches!(
                code,
                ErrorCode::UpstreamFailed | ErrorCode::Unavailable | ErrorCode::ResourceExhausted
            );
            let error = with_wait(Error::new(code, "no"));
            assert_eq!(error.retry_after.is_some(), movable, "{}", code.name());
        }
        let own = Error::new(ErrorCode::Unavailable, "no").with_retry_after(Duration::from_secs(9));
        assert_eq!(with_wait(own).retry_after, Some(Duration::from_secs(9)));
    }
}
