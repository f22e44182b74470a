//! The wait after a failure: doubles up to a cap, and differs from gateway to gateway.

use std::time::Duration;

/// The next wait.
#[derive(Debug)]
pub(crate) struct Pause {
    bounds: (Duration, Duration),
    next: Duration,
}

impl Pause {
    pub(crate) fn new(bounds: (Duration, Duration)) -> Self {
        Self { bounds, next: bounds.0 }
    }

    /// Things went well for a while.
    pub(crate) fn reset(&mut self) {
        self.next = self.bounds.0;
    }

    /// How long to wait now: three quarters of it are sure, so that many gateways do not ask at once.
    pub(crate) fn take(&mut self, random: f64) -> Duration {
        let now = self.next;
        self.next = (now * 2).min(self.bounds.1);
        now.mul_f64(0.75 + 0.25 * random.clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_doubles_up_to_the_cap_and_starts_anew_after_a_good_while() {
        let mut pause = Pause::new((Duration::from_millis(200), Duration::from_secs(2)));
        let waits: Vec<u128> = (0..6).map(|_| pause.take(1.0).as_millis()).collect();
        assert_eq!(waits, [200, 400, 800, 1600, 2000, 2000]);
        pause.reset();
        assert_eq!(pause.take(0.0).as_millis(), 150);
    }
}
