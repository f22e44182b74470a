//! Where the time of steps goes, by operation. Off unless asked for; results never depend on it.

use std::time::{Duration, Instant};

/// The operations of a step, in the order of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// Embedding rows, rotary angles, units of attention.
    Begin,
    /// Norm and quantisation of the rows that a product reads.
    Prepare,
    Qkv,
    /// Bias, head norms, rotation, keys and values into their pages.
    Place,
    Attend,
    Output,
    /// Gate and up products, activation function, quantisation of the result.
    GateUp,
    Down,
    Head,
    Sample,
}

impl Op {
    /// All of them with their names.
    pub(crate) const ALL: [(Self, &'static str); 10] = [
        (Self::Begin, "begin"),
        (Self::Prepare, "norm_quantise"),
        (Self::Qkv, "qkv"),
        (Self::Place, "rope_kv_write"),
        (Self::Attend, "attention"),
        (Self::Output, "attention_output"),
        (Self::GateUp, "gate_up"),
        (Self::Down, "down"),
        (Self::Head, "lm_head"),
        (Self::Sample, "sample"),
    ];
}

/// Times of operations since the last `reset`.
#[derive(Default)]
pub(crate) struct Profile {
    last: Option<Instant>,
    on: bool,
    spent: [(Duration, u64); Op::ALL.len()],
}

impl Profile {
    /// Forget everything; measure from now on or no more.
    pub(crate) fn reset(&mut self, on: bool) {
        *self = Self { on, ..Self::default() };
    }

    /// A step or sampling begins.
    pub(crate) fn begin(&mut self) {
        self.last = self.on.then(Instant::now);
    }

    /// `op` has just ended; it began where the operation before it ended.
    pub(crate) fn lap(&mut self, op: Op) {
        let Some(last) = self.last else { return };
        let now = Instant::now();
        let (time, count) = &mut self.spent[op as usize];
        *time += now - last;
        *count += 1;
        self.last = Some(now);
    }

    /// Name, seconds and number of calls of each operation that ran.
    pub(crate) fn report(&self) -> Vec<(&'static str, f64, u64)> {
        Op::ALL
            .iter()
            .map(|&(op, name)| (name, self.spent[op as usize].0.as_secs_f64(), self.spent[op as usize].1))
            .filter(|entry| entry.2 > 0)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_stand_in_the_order_of_their_numbers() {
        assert!(Op::ALL.iter().enumerate().all(|(i, (op, _))| *op as usize == i));
    }

    #[test]
    fn laps_are_counted_only_while_it_is_on() {
        let mut profile = Profile::default();
        profile.begin();
        profile.lap(Op::Qkv);
        assert_eq!(profile.report(), []);
        profile.reset(true);
        profile.begin();
        profile.lap(Op::Qkv);
        profile.lap(Op::Qkv);
        assert_eq!(profile.report().iter().map(|e| (e.0, e.2)).collect::<Vec<_>>(), [("qkv", 2)]);
        profile.reset(false);
        assert_eq!(profile.report(), []);
    }
}
