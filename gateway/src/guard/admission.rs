//! Which requests are let in, and when: allowances of their tenant, room for their bytes, and a place that is held until
//! the last byte of the answer, for which a bounded queue waits.
//!
//! Whoever leaves the queue, by its time, its deadline or with its client, frees his place in it. Refusals say when to
//! come back, by the pace at which places have become free.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::body::Body;
use branchline_core::{Error, ErrorCode, Result};
use branchline_telemetry::Metrics;
use branchline_worker::follow_files;
use http::{HeaderMap, HeaderName, Request};
use http_body::Body as _;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::KeyHash;
use super::flight::{AHEAD, Flight, Held};
use super::policies::Class;
use super::queue::{Asked, Place, Queue, Waiting};
use super::tenants::{Tenant, Tenants};
use super::usage::{BYTES_A_TOKEN, Told, Usage};
use crate::config::Options;

/// Bounds of what a client is told to wait.
const WAIT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

const PRIORITY: [HeaderName; 2] =
    [HeaderName::from_static("x-branchline-priority"), HeaderName::from_static("x-smg-priority")];
const DEADLINE: HeaderName = HeaderName::from_static("x-branchline-deadline-ms");

/// All that requests compete for.
#[derive(Debug)]
pub struct Admission {
    queue: Option<Arc<Queue>>,
    most_waiting: usize,
    patience: Duration,
    tenants: Option<Tenants>,
    flight: Option<Arc<Flight>>,
    metrics: Arc<Metrics>,
}

/// What a request was let in with; given back when dropped.
#[derive(Debug)]
pub struct Permit {
    place: Option<Place>,
    admission: Arc<Admission>,
    _held: Option<Arc<Held>>,
    /// Whose it is and the tokens it was let in with.
    charged: Option<(Arc<Tenant>, f64)>,
    /// The rule of its model that it was charged by as well.
    rule: OnceLock<Arc<str>>,
    /// Nothing is done for it: a rule refused it.
    is_void: AtomicBool,
    /// Tokens that engines counted since.
    tokens: AtomicU64,
    /// What the answer says of them, where no engine of ours counted.
    told: AtomicU64,
    is_guess: AtomicBool,
    deadline: Option<Instant>,
}

/// A request at the door.
#[must_use = "a request that is not let in is refused"]
pub enum Entry {
    /// It is in.
    In(Permit),
    /// It waits for a place.
    Waits(Box<Queued>),
}

/// A request in the queue.
pub struct Queued {
    waiting: Waiting,
    permit: Permit,
}

impl Admission {
    /// What the options ask for; `None` if they limit nothing.
    ///
    /// # Errors
    /// If the file of tenants can't be used.
    pub fn of(options: &Options, metrics: &Arc<Metrics>) -> Result<Option<Arc<Self>>> {
        let tenants = Tenants::load(options.tenant_file.as_deref(), options.tenant_header.as_deref())?;
        let places = options.max_concurrent_requests;
        let queue = (places > 0).then(|| Queue::new(places, options.queue_size));
        let tenants = (queue.is_some() || tenants.file().is_some()).then_some(tenants);
        let flight = options.max_bytes_in_flight.map(|most| Flight::new(most.0));
        if queue.is_none() && tenants.is_none() && flight.is_none() {
            return Ok(None);
        }
        Ok(Some(Arc::new(Self {
            queue,
            most_waiting: options.queue_size,
            patience: options.queue_timeout,
            tenants,
            flight,
            metrics: Arc::clone(metrics),
        })))
    }

    /// Reads the file of tenants again whenever it changes; ends with `stop`, at once if there is none.
    pub async fn follow(self: Arc<Self>, stop: CancellationToken) {
        let Some(tenants) = &self.tenants else { return };
        let Some(file) = tenants.file() else { return };
        follow_files(vec![file.clone()], "tenants", &self.metrics, stop, || tenants.read_again()).await;
    }

    /// Lets a request in, puts it in the queue, or refuses it. Its body is counted from now on.
    ///
    /// # Errors
    /// `ResourceExhausted` with the time to wait; `InvalidArgument` if its deadline is no number.
    pub fn ask(self: &Arc<Self>, key: Option<KeyHash>, request: &mut Request<Body>) -> Result<Entry> {
        let now = Instant::now();
        let deadline = deadline(request.headers(), now)?;
        let bytes = request.body().size_hint();
        let declared = usize::try_from(bytes.lower()).unwrap_or(usize::MAX);
        let tenant = self.tenants.as_ref().map(|tenants| tenants.of(key, request.headers()));
        let cost = (declared as f64 / BYTES_A_TOKEN).max(1.0);
        if let Some(tenant) = &tenant {
            tenant.take(cost, now).inspect_err(|_| self.count("allowance"))?;
        }
        let mut permit = Permit {
            place: None,
            admission: Arc::clone(self),
            _held: None,
            charged: tenant.clone().map(|tenant| (tenant, cost)),
            rule: OnceLock::new(),
            is_void: AtomicBool::new(false),
            tokens: AtomicU64::new(0),
            told: AtomicU64::new(0),
            is_guess: AtomicBool::new(true),
            deadline,
        };
        if let Some(flight) = &self.flight {
            let held = match flight.take(declared) {
                Ok(held) => held,
                Err(error) => {
                    self.count("bytes");
                    return Err(permit.void(error));
                }
            };
            if bytes.exact().is_none() || declared > AHEAD {
                let body = std::mem::take(request.body_mut());
                *request.body_mut() = held.count(body);
            }
            permit._held = Some(held);
        }
        let (Some(queue), Some(tenant)) = (&self.queue, tenant) else { return Ok(Entry::In(permit)) };
        let asked = PRIORITY.iter().find_map(|name| request.headers().get(name)?.to_str().ok());
        self.place(permit, queue, (&tenant, tenant.class(asked), cost), now)
    }

    fn place(
        self: &Arc<Self>,
        mut permit: Permit,
        queue: &Arc<Queue>,
        (tenant, class, cost): (&Arc<Tenant>, Class, f64),
        now: Instant,
    ) -> Result<Entry> {
        match queue.ask(tenant, class, cost, now) {
            Asked::Place(place) => {
                permit.place = Some(place);
                Ok(Entry::In(permit))
            }
            Asked::Full => {
                let text = format!("all places are taken and {} requests wait for one", self.most_waiting);
                Err(permit.void(self.refusal("full", &text)))
            }
            Asked::Wait(waiting) => {
                // Nobody is helped by a place that comes after the answer was wanted.
                let left = permit.deadline.map(|deadline| deadline.saturating_duration_since(now));
                if left.is_some_and(|left| queue.expected().0 > left) {
                    let text = "the queue is longer than the request's deadline allows";
                    return Err(permit.void(self.refusal("deadline", text)));
                }
                Ok(Entry::Waits(Box::new(Queued { waiting, permit })))
            }
        }
    }

    /// Requests in the queue.
    pub fn waiting(&self) -> usize {
        self.queue.as_ref().map_or(0, |queue| queue.waiting())
    }

    /// Bytes of bodies that are held.
    pub fn bytes(&self) -> usize {
        self.flight.as_ref().map_or(0, |flight| flight.bytes())
    }

    fn count(&self, reason: &'static str) {
        self.metrics.admission_refused.with([reason]).inc();
    }

    fn refusal(&self, reason: &'static str, why: &str) -> Error {
        self.count(reason);
        let wait = self.queue.as_ref().map_or(WAIT.0, |queue| queue.expected().1).clamp(WAIT.0, WAIT.1);
        Error::new(ErrorCode::ResourceExhausted, format!("{why}; try again later")).with_retry_after(wait)
    }
}

/// When the client has no use for an answer any more, by its own word.
fn deadline(headers: &HeaderMap, now: Instant) -> Result<Option<Instant>> {
    let Some(value) = headers.get(DEADLINE) else { return Ok(None) };
    let left = value.to_str().ok().and_then(|text| text.trim().parse::<u64>().ok());
    match left.and_then(|left| now.checked_add(Duration::from_millis(left))) {
        Some(deadline) => Ok(Some(deadline)),
        None => {
            let message = "x-branchline-deadline-ms is no number of milliseconds; give how long the answer is wanted, \
                           such as 30000";
            Err(Error::invalid("x-branchline-deadline-ms", message))
        }
    }
}

impl Queued {
    /// The permit, when its turn has come.
    ///
    /// # Errors
    /// `ResourceExhausted` if the wait was too long, `DeadlineExceeded` if the request's own deadline passed.
    pub async fn turn(self) -> Result<Permit> {
        let Self { mut waiting, mut permit } = self;
        let admission = Arc::clone(&permit.admission);
        let left = permit.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let patience = left.map_or(admission.patience, |left| left.min(admission.patience));
        match timeout(patience, waiting.turn()).await {
            Ok(Some(place)) => {
                permit.place = Some(place);
                Ok(permit)
            }
            _ if left.is_some_and(|left| left <= admission.patience) => {
                admission.count("deadline");
                let text = "the request's deadline passed before a place became free";
                let error = Error::new(ErrorCode::DeadlineExceeded, text);
                Err(permit.void(error))
            }
            _ => {
                let text = format!("no place became free within --queue-timeout of {:?}", admission.patience);
                Err(permit.void(admission.refusal("timeout", &text)))
            }
        }
    }
}

impl Permit {
    /// A worker counted so many tokens of the request.
    pub fn used(&self, tokens: u32) {
        self.tokens.fetch_add(tokens.into(), Ordering::Relaxed);
    }

    /// Its model is known, or that it is one of these: takes it from what its tenant may use of the first that is limited.
    /// Once a request.
    ///
    /// # Errors
    /// `ResourceExhausted` with the time to wait; the request then costs its tenant nothing.
    pub fn name_model<'a>(&self, models: impl IntoIterator<Item = &'a str>) -> Result<()> {
        let Some((tenant, cost)) = self.charged.as_ref().filter(|_| self.rule.get().is_none()) else {
            return Ok(());
        };
        let now = Instant::now();
        for model in models {
            match tenant.take_model(model, *cost, now) {
                Ok(None) => {}
                Ok(Some(rule)) => {
                    self.rule.get_or_init(|| rule);
                    return Ok(());
                }
                Err(error) => {
                    self.is_void.store(true, Ordering::Relaxed);
                    self.admission.count("model");
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Whether anybody wants to know what its answer says of tokens.
    pub(super) fn is_charged(&self) -> bool {
        self.charged.is_some()
    }

    /// What its answer said of tokens.
    pub(super) fn told(&self, usage: &Usage) {
        let (tokens, is_guess) = match usage.told() {
            Told::Counted(tokens) => (tokens, false),
            Told::Guessed(tokens) => (tokens, true),
        };
        self.told.store(tokens, Ordering::Relaxed);
        self.is_guess.store(is_guess, Ordering::Relaxed);
    }

    /// How long the answer is still wanted, if the client said.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Takes back what it was charged: nothing was done for it.
    fn void(mut self, error: Error) -> Error {
        if let Some((tenant, cost)) = self.charged.take() {
            tenant.forgive(None, cost);
        }
        error
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let Some((tenant, cost)) = self.charged.take() else { return };
        let rule = self.rule.get().map(|rule| &**rule);
        // Who never had a place had nothing done.
        if *self.is_void.get_mut() || (self.admission.queue.is_some() && self.place.is_none()) {
            return tenant.forgive(rule, cost);
        }
        let (counted, told) = (*self.tokens.get_mut() as f64, *self.told.get_mut() as f64);
        let more = match *self.is_guess.get_mut() {
            _ if counted > 0.0 => counted - cost,
            false => told - cost,
            // The prompt was paid for.
            true => told,
        };
        tenant.settle(rule, more);
    }
}

#[cfg(test)]
#[path = "admission/tests.rs"]
mod tests;
