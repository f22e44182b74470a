//! A whole answer, put together from its pieces; streams keep the same state to know what they have sent.

use branchline_core::Result;
use branchline_protocol::openai::Usage;
use branchline_protocol::{LeaseNote, Position, Timings};
use futures_util::StreamExt as _;

use crate::dispatch::{Batch, End, Item, LeaseFound, Running};

/// One prompt so far.
#[derive(Debug, Default)]
pub(super) struct Prompted {
    pub(super) tokens: u64,
    pub(super) cached: u64,
    /// Its lease, if it has one.
    pub(super) lease: Option<LeaseFound>,
    /// Its logprobs, if asked for.
    pub(super) input: Vec<Position>,
}

/// One sequence so far.
#[derive(Debug, Default)]
pub(super) struct Sequence {
    pub(super) job: usize,
    pub(super) text: String,
    pub(super) ids: Vec<u32>,
    pub(super) logprobs: Vec<Position>,
    pub(super) completion_tokens: u64,
    pub(super) end: Option<End>,
}

/// A batch so far.
#[derive(Debug, Default)]
pub(super) struct Gathered {
    pub(super) prompts: Vec<Prompted>,
    /// Whether a stream has told of its lease.
    lease_told: bool,
    pub(super) sequences: Vec<Sequence>,
}

impl Gathered {
    /// Empty prompts and sequences for these jobs.
    pub(super) fn new(jobs: &[Running]) -> Self {
        let mut gathered = Self::default();
        for (job, running) in jobs.iter().enumerate() {
            let tokens = running.job().tokens.len() as u64;
            gathered.prompts.push(Prompted { tokens, ..Prompted::default() });
            for _ in 0..running.job().sampling.sequences() {
                gathered.sequences.push(Sequence { job, ..Sequence::default() });
            }
        }
        gathered
    }

    /// Takes what a piece says of counts and ends, and leaves its text, ids and logprobs in it.
    pub(super) fn count(&mut self, item: &Item) {
        let prompt = &mut self.prompts[item.job];
        if let Some(found) = item.piece.prompt {
            prompt.cached = found.cached.into();
        }
        if item.piece.lease.is_some() {
            prompt.lease.clone_from(&item.piece.lease);
        }
        prompt.input.extend_from_slice(&item.piece.input);
        let sequence = &mut self.sequences[item.sequence];
        sequence.completion_tokens += item.piece.token_ids.len() as u64;
        if let Some(end) = &item.piece.end {
            sequence.completion_tokens = end.completion_tokens.into();
            sequence.end = Some(end.clone());
        }
    }

    /// Takes a whole piece.
    pub(super) fn add(&mut self, mut item: Item) {
        self.count(&item);
        let sequence = &mut self.sequences[item.sequence];
        sequence.text.push_str(&item.piece.text);
        sequence.ids.append(&mut item.piece.token_ids);
        sequence.logprobs.append(&mut item.piece.logprobs);
    }

    /// What became of the request's lease: of several prompts the first that did not find it, else the first.
    pub(super) fn lease(&self) -> Option<LeaseNote> {
        let known = || self.prompts.iter().filter_map(|prompt| prompt.lease.as_ref());
        let lost = known().find(|lease| lease.state != "held");
        lost.or_else(|| known().next()).map(LeaseFound::note)
    }

    /// The same for a stream: once.
    pub(super) fn lease_news(&mut self) -> Option<LeaseNote> {
        let news = if self.lease_told { None } else { self.lease() };
        self.lease_told |= news.is_some();
        news
    }

    /// Of all sequences together, when the last has ended.
    fn timings(&self) -> Option<Timings> {
        let each = self.sequences.iter().map(|sequence| sequence.end.as_ref()?.timings);
        each.reduce(|first, second| Some(first?.join(second?))).flatten()
    }

    /// Tokens of all prompts, each counted once, and all sequences.
    pub(super) fn usage(&self) -> Usage {
        let ends = self.sequences.iter().filter_map(|sequence| sequence.end.as_ref());
        let continuations = ends.map(|end| end.continuations).max().unwrap_or(0);
        let usage = Usage::new(
            self.prompts.iter().map(|prompt| prompt.tokens).sum(),
            self.sequences.iter().map(|sequence| sequence.completion_tokens).sum(),
            self.prompts.iter().map(|prompt| prompt.cached).sum(),
        );
        Usage { continuations, times: self.timings().map(Into::into), ..usage }
    }
}

/// Runs jobs to their end.
///
/// # Errors
/// The first failure; the other jobs are cancelled.
pub(super) async fn gather(jobs: Vec<Running>) -> Result<Gathered> {
    let mut gathered = Gathered::new(&jobs);
    let mut batch = Batch::new(jobs);
    while let Some(item) = batch.next().await {
        gathered.add(item?);
    }
    Ok(gathered)
}
