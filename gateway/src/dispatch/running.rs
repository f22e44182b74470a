//! One job on its way: attempts before the first piece, one worker's pieces after it, another one's if it dies.
//!
//! A stream of deltas is a leg. Before the first piece a second leg may race the first; after it, a leg that breaks
//! is continued on a worker that promises the same bits. Pulled by its reader; dropping it cancels every leg at once.

mod emitted;
mod half;
mod leg;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use branchline_core::{Error, ErrorCode, Result, WorkerId};
use branchline_worker::{Judgement, Watch};
use futures_util::Stream;
use tokio::time::Sleep;
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::observe::Observer;
use super::piece::nonsense;
use super::{Job, JobLease, Piece};
use crate::app::App;
use emitted::Emitted;
use half::{Fault, Half};
use leg::{Chosen, Leg};

/// Which leg something came of, and what.
type Arrival = (usize, std::result::Result<Piece, (Fault, Error)>);

/// What a client is told to wait if nobody knows better.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A job that a worker has taken.
pub struct Running {
    app: Arc<App>,
    job: Job,
    observer: Observer,
    legs: Vec<Leg>,
    /// Workers that had their attempt and were not at one that another one's fault ended, the latest last.
    tried: Vec<WorkerId>,
    attempts: usize,
    /// Attempts that were split: what they left on a worker may still be ending there.
    splits: usize,
    arrived: Instant,
    /// Whether a piece has come: from then on the answer is that worker's.
    begun: bool,
    /// What each sequence has sent, for a continuation.
    emitted: Vec<Emitted>,
    /// Times that a leg was continued elsewhere.
    continuations: u32,
    /// Sequences that have not ended.
    open: u32,
    over: bool,
    /// Armed while the worker is silent.
    silence: Option<Pin<Box<Sleep>>>,
    /// Asked of the fleet while no piece has come.
    watch: Option<(Watch, Pin<Box<Sleep>>)>,
    /// Ready when the gateway's own end does not wait any longer.
    ending: Pin<Box<WaitForCancellationFutureOwned>>,
}

/// Chooses a worker and hands it the job.
///
/// # Errors
/// `Cancelled` if the job was aborted meanwhile, `Unavailable` if no worker can take it, or the worker's refusal.
pub fn start(app: &Arc<App>, job: Job, arrived: Instant) -> Result<Running> {
    let open = job.sampling.sequences();
    let mut running = Running {
        app: Arc::clone(app),
        observer: Observer::new(Arc::clone(&app.metrics)),
        emitted: (0..open).map(|_| Emitted::default()).collect(),
        job,
        legs: Vec::with_capacity(1),
        tried: Vec::new(),
        attempts: 0,
        splits: 0,
        arrived,
        begun: false,
        continuations: 0,
        open,
        over: false,
        silence: None,
        watch: None,
        ending: Box::pin(app.ending.clone().cancelled_owned()),
    };
    app.fleet.earn_retry();
    let begun = running.choose().and_then(|choice| running.send(choice));
    begun.or_else(|error| running.move_on(error)).map_err(|error| {
        running.over = true;
        with_wait(running.job.in_clients_words(error))
    })?;
    Ok(running)
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

    /// A worker that had no try yet.
    fn choose(&self) -> Result<Chosen> {
        Leg::choose(&self.app, &self.job, &self.tried)
    }

    /// One more leg, on the chosen worker.
    fn send(&mut self, chosen: Chosen) -> Result<()> {
        self.tried.extend(chosen.ids());
        self.attempts += 1;
        let again = self.splits;
        self.splits += usize::from(again > 0 || matches!(chosen, Chosen::Pair(_)));
        let leg = Leg::first(&self.app, &self.job, chosen, self.arrived, again)?;
        self.observer.chosen(leg.predicted);
        self.legs.push(leg);
        self.arm();
        Ok(())
    }

    /// From now on the latest leg is asked about.
    fn arm(&mut self) {
        self.watch = self.legs.last().and_then(Leg::watch).map(|watch| {
            let sleep = Box::pin(tokio::time::sleep(watch.patience()));
            (watch, sleep)
        });
    }

    /// A worker for a further try, if the request's own limit and the fleet's budget allow one. Nothing is spent unless
    /// there is a worker.
    fn spare(&self) -> Option<Chosen> {
        if self.attempts == 0 || self.attempts > self.app.options.max_retries {
            return None;
        }
        let choice = self.choose().ok()?;
        self.app.fleet.spend_retry().then_some(choice)
    }

    /// Tries elsewhere until a worker takes the job. That there is no other worker is no news: the error is the first
    /// one, unless a later one would be the same everywhere.
    fn move_on(&mut self, first: Error) -> Result<()> {
        let mut last: Option<Error> = None;
        loop {
            let error = last.as_ref().unwrap_or(&first);
            if !may_move(&self.app, &self.job, error) {
                return Err(last.unwrap_or(first));
            }
            let Some(choice) = self.spare() else { return Err(first) };
            self.observer.retried(error.code.name());
            match self.send(choice) {
                Ok(()) => return Ok(()),
                Err(error) => last = Some(error),
            }
        }
    }

    fn accept(&mut self, at: usize, piece: &mut Piece) {
        if !std::mem::replace(&mut self.begun, true) {
            // The first piece wins the race.
            let mut winner = self.legs.swap_remove(at);
            self.job.live.only_at(&winner.worker);
            winner.half = winner.half.and_then(Half::unless_spent);
            self.legs = vec![winner];
            self.watch = None;
        }
        self.silence = None;
        if let (Some(found), Some(lease)) = (&mut piece.lease, &self.job.lease)
            && let Some(name) = &found.name
        {
            found.id = Some(self.app.leases.sign(name, &lease.tenant));
        }
        if let Some(found) = piece.prompt {
            match self.continuations {
                0 => {
                    self.observer.prompt(found, self.legs[0].predicted);
                    self.job.used(found.tokens);
                }
                // The client knows the prompt; that its continuation found it cached is no news.
                _ => piece.prompt = None,
            }
        }
        let emitted = &mut self.emitted[piece.index as usize];
        emitted.add(piece);
        // At once: who leaves before the end has had them too.
        self.job.used(piece.token_ids.len() as u32);
        if let Some(end) = &mut piece.end {
            end.continuations = self.continuations;
            self.observer.ended(end);
            self.job.used(end.completion_tokens.saturating_sub(emitted.ids.len() as u32));
            for leg in self.legs.extract_if(.., |leg| leg.sequence == Some(piece.index)) {
                self.job.live.left(&leg.worker, &leg.id);
            }
            self.open = self.open.saturating_sub(1);
            self.over = self.open == 0;
        }
        if self.over {
            // The worker's record has its success before the client has the last byte.
            self.legs.clear();
        }
    }

    /// A leg broke: tries elsewhere, goes on elsewhere, or gives up with the error that the client shall see.
    fn fail(&mut self, at: usize, fault: Fault, mut error: Error) -> Result<()> {
        self.silence = None;
        let lost = self.legs.swap_remove(at);
        self.job.live.left(&lost.worker, &lost.id);
        if let Some(half) = &lost.half {
            self.job.live.left(&half.worker, &half.id);
            if !self.begun {
                self.excuse(&lost, half.worker.id, fault);
            }
        }
        if fault == Fault::Transfer {
            // Clients know nothing of halves.
            error.field = None;
        }
        if !self.begun {
            if !self.legs.is_empty() {
                return Ok(());
            }
            // What is left of it is called off before the next try is sent.
            drop(lost);
            let code = error.code.name();
            return match self.move_on(error) {
                Ok(()) => {
                    tracing::warn!(request = %self.job.live.id(), code, "request moved to another worker");
                    Ok(())
                }
                Err(error) => {
                    self.over = true;
                    Err(with_wait(self.job.in_clients_words(error)))
                }
            };
        }
        if self.go_on(&lost, &error).is_err() {
            self.over = true;
            return Err(self.job.in_clients_words(error));
        }
        Ok(())
    }

    /// Of a pair that broke, the half that was not at fault may have the next try as well.
    fn excuse(&mut self, lost: &Leg, prefill: WorkerId, fault: Fault) {
        let (innocent, part) = match fault {
            Fault::Prefill => (lost.worker.id, "prefill"),
            Fault::Transfer => (lost.worker.id, "transfer"),
            Fault::Decode => (prefill, "decode"),
        };
        self.tried.retain(|id| *id != innocent);
        self.app.metrics.pd_failures.with([part]).inc();
    }

    /// Continues what a lost leg carried.
    fn go_on(&mut self, lost: &Leg, error: &Error) -> Result<()> {
        let none = || Error::new(ErrorCode::Unavailable, "the stream can't be continued");
        let dead = matches!(error.code, ErrorCode::UpstreamFailed | ErrorCode::Unavailable);
        let told = self.job.logprobs.as_ref().is_none_or(|logprobs| logprobs.input_start.is_none());
        // Prompt logprobs are whole once any sequence has a token.
        let whole = told || self.emitted.iter().any(|emitted| !emitted.ids.is_empty());
        let possible = self.app.options.continue_streams && dead && whole && !lost.numerics_id.is_empty();
        if !possible || self.continuations as usize >= self.app.options.max_retries.max(1) {
            return Err(none());
        }
        let sequences: Vec<u32> = match lost.sequence {
            Some(sequence) => vec![sequence],
            None => (0..).take(self.emitted.len()).filter(|at| !self.emitted[*at as usize].ended).collect(),
        };
        for (number, sequence) in sequences.into_iter().enumerate() {
            let emitted = &self.emitted[sequence as usize];
            // Other sequences may go on at the same worker.
            let choice = Leg::choose_next(&self.app, &self.job, lost, &self.tried, emitted)?;
            if number == 0 && !self.app.fleet.spend_retry() {
                return Err(none());
            }
            let leg = Leg::resume(&self.app, &self.job, choice, self.arrived, sequence, emitted)?;
            tracing::warn!(request = %self.job.live.id(), sequence, tokens = emitted.ids.len(), "stream continued on another worker");
            self.legs.push(leg);
        }
        self.continuations += 1;
        self.app.metrics.continuations.with([""; 0]).inc();
        Ok(())
    }

    /// Asks about a worker that lets the first piece wait; a second leg may come of it.
    fn poll_watch(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let Some((watch, sleep)) = &mut self.watch else { return Poll::Pending };
            ready!(sleep.as_mut().poll(cx));
            match self.app.fleet.judge(watch) {
                Judgement::Wait(time) => sleep.as_mut().reset(tokio::time::Instant::now() + time),
                Judgement::Stuck => {
                    self.watch = None;
                    if self.legs.len() == 1
                        && let Some(choice) = self.beside()
                    {
                        self.observer.retried("suspected");
                        let sent = self.send(choice).is_ok();
                        self.watch = None;
                        if sent {
                            return Poll::Ready(());
                        }
                    }
                }
            }
        }
    }

    /// Who may have a further try beside the one that is silent: of a pair, the half that is not suspected is free.
    fn beside(&mut self) -> Option<Chosen> {
        let leg = self.legs.first()?;
        let Some(half) = &leg.half else { return self.spare() };
        let innocent = if half.done { half.worker.id } else { leg.worker.id };
        self.tried.retain(|id| *id != innocent);
        self.spare()
    }

    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<Error> {
        let options = &self.app.options;
        let limit = if self.begun { options.idle_timeout } else { options.first_token_timeout };
        let Some(limit) = limit else { return Poll::Pending };
        let silence = self.silence.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        ready!(silence.as_mut().poll(cx));
        let message = format!("the worker was silent for {limit:?}; try again");
        Poll::Ready(Error::new(ErrorCode::DeadlineExceeded, message))
    }

    /// The next piece of any leg, or the leg that broke and why.
    fn poll_legs(&mut self, cx: &mut Context<'_>) -> Poll<Arrival> {
        for at in 0..self.legs.len() {
            let leg = &mut self.legs[at];
            if let Some(half) = &mut leg.half
                && !half.done
            {
                match half.poll(cx) {
                    Poll::Ready(Ok(())) => {
                        leg.stream.waits_no_longer();
                        if self.begun {
                            leg.half = leg.half.take().and_then(Half::unless_spent);
                        } else if at + 1 == self.legs.len() {
                            self.arm();
                        }
                    }
                    // Once output comes, the prompt was there.
                    Poll::Ready(Err(_)) if self.begun => leg.half = None,
                    Poll::Ready(Err(error)) => return Poll::Ready((at, Err((Fault::Prefill, error)))),
                    Poll::Pending => {}
                }
            }
            let leg = &mut self.legs[at];
            let polled = match Pin::new(&mut leg.stream).poll_next(cx) {
                Poll::Pending => continue,
                Poll::Ready(Some(Ok(delta))) => {
                    let read = Piece::read(delta).and_then(|mut piece| {
                        if let (Some(sequence), 0) = (leg.sequence, piece.index) {
                            piece.index = sequence;
                        }
                        match piece.index < self.job.sampling.sequences() {
                            true => Ok(piece),
                            false => Err(nonsense("a sequence was not asked for")),
                        }
                    });
                    read.inspect_err(|_| leg.stream.blame())
                }
                Poll::Ready(Some(Err(error))) => Err(error),
                Poll::Ready(None) => {
                    Err(Error::new(ErrorCode::UpstreamFailed, "the worker ended the answer early; try again"))
                }
            };
            return Poll::Ready((at, polled.map_err(|error| (Fault::of(&error), error))));
        }
        Poll::Pending
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
            if this.ending.as_mut().poll(cx).is_ready() {
                this.over = true;
                this.observer.abandoned(true);
                let text = "the gateway stops and its drain timeout has passed; send the request again";
                return Poll::Ready(Some(Err(with_wait(Error::new(ErrorCode::Unavailable, text)))));
            }
            let (at, (fault, error)) = match this.poll_legs(cx) {
                Poll::Ready((at, Ok(mut piece))) => {
                    this.accept(at, &mut piece);
                    return Poll::Ready(Some(Ok(piece)));
                }
                Poll::Ready((at, Err(error))) => (at, error),
                Poll::Pending if this.poll_watch(cx).is_ready() => continue,
                Poll::Pending => {
                    let error = ready!(this.poll_silence(cx));
                    let mut fault = Fault::Decode;
                    if let Some(leg) = this.legs.first_mut() {
                        leg.blame();
                        if leg.half.as_ref().is_some_and(|half| !half.done) {
                            fault = Fault::Prefill;
                        }
                    }
                    (0, (fault, error))
                }
            };
            if let Err(error) = this.fail(at, fault, error) {
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
mod tests;
