//! Places for requests that run at once, and who gets the next one: the highest class that waits, within it the tenant
//! that has had the least work for its weight.
//!
//! Work is counted in tokens on a virtual clock (start-time fair queueing): a tenant that was away comes back at the
//! clock's time, so it neither saves up nor owes. Whoever has waited for longer than its class stands goes first.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::policies::Class;
use super::tenants::Tenant;

/// Weight of the latest gap between two places that became free.
const WEIGHT: f64 = 0.2;

/// The places and those who wait.
#[derive(Debug)]
pub(super) struct Queue {
    places: usize,
    most: usize,
    /// Beside the lock, for those who only want to know.
    waiting: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    running: usize,
    next: u64,
    /// Virtual time: of the work that was let in last.
    clock: f64,
    pace: Pace,
    lanes: BTreeMap<(Class, Arc<str>), Lane>,
}

/// How fast places become free while all are taken; idle times say nothing of that.
#[derive(Debug, Default)]
struct Pace {
    /// Seconds between two of them, on average.
    gap: Option<f64>,
    /// When the last one became free, or the last free one was taken.
    since: Option<Instant>,
}

impl Pace {
    fn freed(&mut self, now: Instant) {
        if let Some(since) = self.since.replace(now) {
            let gap = now.saturating_duration_since(since).as_secs_f64();
            self.gap = Some(self.gap.map_or(gap, |old| old + WEIGHT * (gap - old)));
        }
    }
}

/// One tenant's waiters of one class, oldest first.
#[derive(Debug)]
struct Lane {
    tenant: Arc<Tenant>,
    waiters: VecDeque<Waiter>,
}

#[derive(Debug)]
struct Waiter {
    id: u64,
    since: Instant,
    cost: f64,
    wake: oneshot::Sender<Place>,
}

/// A place; the next one's when dropped.
#[derive(Debug)]
pub(super) struct Place(Option<Arc<Queue>>);

/// Who waits. Dropping it leaves the queue.
pub(super) struct Waiting {
    queue: Arc<Queue>,
    lane: (Class, Arc<str>),
    id: u64,
    woken: oneshot::Receiver<Place>,
}

/// What asking for a place comes to.
pub(super) enum Asked {
    /// There was one.
    Place(Place),
    /// There will be one.
    Wait(Waiting),
    /// The queue is full.
    Full,
}

impl Queue {
    pub(super) fn new(places: usize, most: usize) -> Arc<Self> {
        Arc::new(Self { places, most, waiting: AtomicUsize::new(0), state: Mutex::default() })
    }

    /// Requests that wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }

    /// How long one waits who comes now, and the next one, by the pace of late.
    pub(super) fn expected(&self) -> (Duration, Duration) {
        let gap = self.state.lock().pace.gap.unwrap_or(0.0);
        let wait = |places: usize| Duration::try_from_secs_f64(gap * places as f64).unwrap_or(Duration::MAX);
        (wait(self.waiting()), wait(self.waiting() + 1))
    }

    /// A place for work of `cost` tokens, at once if nobody waits for it.
    pub(super) fn ask(
        self: &Arc<Self>,
        tenant: &Arc<Tenant>,
        class: Class,
        cost: f64,
        now: Instant,
    ) -> Asked {
        let mut state = self.state.lock();
        if state.running < self.places && self.waiting() == 0 {
            state.running += 1;
            if state.running == self.places {
                state.pace.since = Some(now);
            }
            state.clock = state.clock.max(tenant.start(state.clock, cost));
            return Asked::Place(Place(Some(Arc::clone(self))));
        }
        if self.waiting() >= self.most {
            return Asked::Full;
        }
        let (wake, woken) = oneshot::channel();
        let id = state.next;
        state.next += 1;
        let key = (class, Arc::clone(tenant.name()));
        let lane = state.lanes.entry(key.clone());
        let lane = lane.or_insert_with(|| Lane { tenant: Arc::clone(tenant), waiters: VecDeque::new() });
        lane.waiters.push_back(Waiter { id, since: now, cost, wake });
        self.waiting.fetch_add(1, Ordering::AcqRel);
        Asked::Wait(Waiting { queue: Arc::clone(self), lane: key, id, woken })
    }

    /// A place was given back.
    pub(super) fn freed(&self, now: Instant) {
        let mut state = self.state.lock();
        if state.running == self.places {
            state.pace.freed(now);
        }
    }

    /// Whose turn it is; the place is free if nobody's.
    fn next(&self) -> Option<oneshot::Sender<Place>> {
        let mut state = self.state.lock();
        let now = Instant::now();
        let clock = state.clock;
        let rank = |(class, _): &(Class, Arc<str>), lane: &Lane| {
            let oldest = lane.waiters.front().map_or(now, |waiter| waiter.since);
            let starves = now.saturating_duration_since(oldest) >= class.patience();
            (if starves { Class::System } else { *class }, lane.tenant.position(clock), oldest)
        };
        let ranked = state.lanes.iter().map(|(key, lane)| (rank(key, lane), key));
        let found = ranked.min_by(|((class, at, since), _), ((other, later, after), _)| {
            class.cmp(other).then(at.total_cmp(later)).then(since.cmp(after))
        });
        let Some(key) = found.map(|(_, key)| key.clone()) else {
            state.running = state.running.saturating_sub(1);
            state.pace.since = None;
            return None;
        };
        let lane = state.lanes.get_mut(&key)?;
        let waiter = lane.waiters.pop_front()?;
        let start = lane.tenant.start(clock, waiter.cost);
        if lane.waiters.is_empty() {
            state.lanes.remove(&key);
        }
        state.clock = clock.max(start);
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        Some(waiter.wake)
    }

    fn leave(&self, key: &(Class, Arc<str>), id: u64) {
        let mut state = self.state.lock();
        let Some(lane) = state.lanes.get_mut(key) else { return };
        let before = lane.waiters.len();
        lane.waiters.retain(|waiter| waiter.id != id);
        let gone = before - lane.waiters.len();
        if lane.waiters.is_empty() {
            state.lanes.remove(key);
        }
        self.waiting.fetch_sub(gone, Ordering::AcqRel);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let Some(queue) = self.0.take() else { return };
        queue.freed(Instant::now());
        while let Some(wake) = queue.next() {
            match wake.send(Self(Some(Arc::clone(&queue)))) {
                Ok(()) => return,
                // Its client has just left: the place is the next one's.
                Err(mut place) => place.0 = None,
            }
        }
    }
}

impl Waiting {
    /// The place, when its turn has come.
    pub(super) async fn turn(&mut self) -> Option<Place> {
        (&mut self.woken).await.ok()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.queue.leave(&self.lane, self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::policies::Policy;
    use proptest::prelude::*;

    fn tenant(name: &str, weight: f64) -> Arc<Tenant> {
        Arc::new(Tenant::new(name, Policy { weight, ..Policy::default() }))
    }

    fn wait(queue: &Arc<Queue>, tenant: &Arc<Tenant>, class: Class, cost: f64) -> Waiting {
        match queue.ask(tenant, class, cost, Instant::now()) {
            Asked::Wait(waiting) => waiting,
            _ => panic!("no place is free and the queue is not full"),
        }
    }

    fn hold(queue: &Arc<Queue>) -> Place {
        match queue.ask(&tenant("first", 1.0), Class::Default, 0.0, Instant::now()) {
            Asked::Place(place) => place,
            _ => panic!("the first place is free"),
        }
    }

    /// Lets everybody in, one after the other; whose turn it was.
    fn order(place: Place, mut waiting: Vec<(&'static str, Waiting)>) -> Vec<&'static str> {
        let mut order = Vec::new();
        drop(place);
        while !waiting.is_empty() {
            let turn = |(at, (_, one)): (usize, &mut (_, Waiting))| Some((at, one.woken.try_recv().ok()?));
            let (at, place) = waiting.iter_mut().enumerate().find_map(turn).expect("somebody has the place");
            order.push(waiting.remove(at).0);
            drop(place);
        }
        order
    }

    #[test]
    fn tenants_get_tokens_by_their_weight_and_not_turns_by_their_number() {
        let queue = Queue::new(1, 100);
        let place = hold(&queue);
        let (heavy, light, big) = (tenant("heavy", 3.0), tenant("light", 1.0), tenant("big", 1.0));
        let mut waiting = Vec::new();
        for _ in 0..30 {
            waiting.push(("heavy", wait(&queue, &heavy, Class::Default, 10.0)));
        }
        for _ in 0..10 {
            waiting.push(("light", wait(&queue, &light, Class::Default, 10.0)));
        }
        waiting.push(("big", wait(&queue, &big, Class::Default, 100.0)));
        waiting.push(("big", wait(&queue, &big, Class::Default, 100.0)));
        let order = order(place, waiting);
        let first = |name: &str| order[..21].iter().filter(|one| **one == name).count();
        assert_eq!((first("heavy"), first("light"), first("big")), (15, 5, 1), "{order:?}");
        assert_eq!(
            order.iter().rposition(|one| *one == "big"),
            Some(41),
            "its second costs as much as ten others'"
        );
    }

    #[test]
    fn a_higher_class_goes_first_and_one_that_has_waited_too_long_goes_with_it() {
        let queue = Queue::new(1, 10);
        let place = hold(&queue);
        let (a, b) = (tenant("a", 1.0), tenant("b", 1.0));
        let ago = Instant::now().checked_sub(Class::Bulk.patience()).expect("the machine runs for longer");
        let Asked::Wait(starving) = queue.ask(&a, Class::Bulk, 1.0, ago) else { panic!("it waits") };
        let waiting = vec![
            ("bulk", wait(&queue, &b, Class::Bulk, 1.0)),
            ("default", wait(&queue, &b, Class::Default, 1.0)),
            ("interactive", wait(&queue, &b, Class::Interactive, 1.0)),
            ("starving", starving),
        ];
        assert_eq!(order(place, waiting), ["starving", "interactive", "default", "bulk"]);
    }

    #[test]
    fn a_tenant_that_was_away_has_saved_nothing() {
        let queue = Queue::new(1, 100);
        let (busy, away) = (tenant("busy", 1.0), tenant("away", 1.0));
        for _ in 0..50 {
            let Asked::Place(place) = queue.ask(&busy, Class::Default, 10.0, Instant::now()) else {
                panic!("a place is free")
            };
            drop(place);
        }
        let place = hold(&queue);
        let mut waiting = Vec::new();
        for _ in 0..4 {
            waiting.push(("busy", wait(&queue, &busy, Class::Default, 10.0)));
            waiting.push(("away", wait(&queue, &away, Class::Default, 10.0)));
        }
        let order = order(place, waiting);
        let first = order[..4].iter().filter(|one| **one == "away").count();
        assert!((2..=3).contains(&first), "{order:?}");
    }

    #[test]
    fn whoever_leaves_as_his_turn_comes_hands_the_place_on() {
        let queue = Queue::new(1, 10);
        let place = hold(&queue);
        let one = tenant("one", 1.0);
        let (first, mut second) =
            (wait(&queue, &one, Class::Default, 1.0), wait(&queue, &one, Class::Default, 1.0));
        drop(place);
        assert!(second.woken.try_recv().is_err());
        drop(first);
        let place = second.woken.try_recv().expect("the place was handed on");
        assert_eq!(queue.waiting(), 0);
        drop(place);
        assert_eq!(queue.state.lock().running, 0);
    }

    #[test]
    fn the_pace_is_that_of_a_full_house_and_not_of_a_quiet_hour() {
        let queue = Queue::new(2, 10);
        let (one, start) = (tenant("one", 1.0), Instant::now());
        let at = |second: u64| start + Duration::from_secs(second);
        let take = |second| match queue.ask(&one, Class::Default, 1.0, at(second)) {
            Asked::Place(mut place) => place.0.take(),
            _ => panic!("a place is free"),
        };
        let give = |second| {
            queue.freed(at(second));
            assert!(queue.next().is_none(), "nobody waits");
        };
        take(0);
        give(3600);
        take(3600);
        give(7200);
        assert_eq!(queue.expected().1, Duration::ZERO, "no one had to wait for these");
        take(7300);
        take(7310);
        give(7315);
        give(9000);
        assert_eq!(queue.expected().1, Duration::from_secs(5), "the house was full for five seconds");
    }

    proptest! {
        #[test]
        fn no_place_is_lost_or_made_whatever_comes_and_goes(
            moves in proptest::collection::vec((0u8..4, 0usize..8, 1u32..100), 1..200),
            places in 1usize..4,
        ) {
            let queue = Queue::new(places, 5);
            let tenants: Vec<_> = ["a", "b", "c"].into_iter().map(|name| tenant(name, 1.0)).collect();
            let (mut held, mut waiting) = (Vec::new(), Vec::new());
            for (kind, at, cost) in moves {
                match kind {
                    0 | 1 => match queue.ask(&tenants[at % 3], Class::ALL[at % 4], cost.into(), Instant::now()) {
                        Asked::Place(place) => held.push(place),
                        Asked::Wait(one) => waiting.push(one),
                        Asked::Full => prop_assert_eq!(queue.waiting(), 5),
                    },
                    2 if !held.is_empty() => drop(held.swap_remove(at % held.len())),
                    3 if !waiting.is_empty() => drop(waiting.swap_remove(at % waiting.len())),
                    _ => {}
                }
                waiting.retain_mut(|one: &mut Waiting| match one.woken.try_recv() {
                    Ok(place) => { held.push(place); false }
                    Err(_) => true,
                });
                prop_assert!(held.len() <= places);
                prop_assert_eq!(queue.state.lock().running, held.len());
                prop_assert_eq!(queue.waiting(), waiting.len());
                prop_assert!(waiting.is_empty() || held.len() == places, "nobody waits for a free place");
            }
            drop(held);
            drop(waiting);
            prop_assert_eq!((queue.state.lock().running, queue.waiting()), (0, 0));
        }
    }
}
