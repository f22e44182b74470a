//! Several jobs as one stream. Sequences are numbered over the whole batch: job by job, n of each.

use std::pin::Pin;
use std::task::{Context, Poll};

use branchline_core::Result;
use futures_util::Stream;
use futures_util::stream::SelectAll;

use super::{Piece, Running};

/// A piece and where it belongs.
#[derive(Debug)]
pub struct Item {
    /// Which job.
    pub job: usize,
    /// Which sequence of the batch.
    pub sequence: usize,
    /// The news.
    pub piece: Piece,
}

/// Jobs that run side by side. Dropping it cancels all of them.
pub struct Batch {
    members: SelectAll<Member>,
    sequences: usize,
}

struct Member {
    job: usize,
    base: usize,
    running: Running,
}

impl Batch {
    /// Puts jobs together, in order.
    pub fn new(jobs: Vec<Running>) -> Self {
        let mut members = SelectAll::new();
        let mut sequences = 0;
        for (job, running) in jobs.into_iter().enumerate() {
            let count = running.job().sampling.sequences() as usize;
            members.push(Member { job, base: sequences, running });
            sequences += count;
        }
        Self { members, sequences }
    }

    /// Sequences of the whole batch.
    pub fn sequences(&self) -> usize {
        self.sequences
    }
}

impl Stream for Batch {
    type Item = Result<Item>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.members).poll_next(cx)
    }
}

impl Stream for Member {
    type Item = Result<Item>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let (job, base) = (self.job, self.base);
        Pin::new(&mut self.running).poll_next(cx).map(|polled| {
            polled.map(|outcome| {
                outcome.map(|piece| Item { job, sequence: base + piece.index as usize, piece })
            })
        })
    }
}
