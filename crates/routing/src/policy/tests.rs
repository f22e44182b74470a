use super::*;
use rand::SeedableRng;
use rand::rngs::StdRng;

fn candidate(number: u32, uncached_tokens: u64, queued_tokens: u64, running: u64) -> Candidate {
    let name = u64::from(number);
    Candidate {
        worker: WorkerId(number),
        name,
        uncached_tokens,
        copied_tokens: 0,
        queued_tokens,
        running,
        surplus_tokens: 0,
        hinted_tokens: 0,
        shared_by: 1,
        usage: 0.0,
        speed: 1.0,
    }
}

fn counts(policy: &dyn Policy, candidates: &[Candidate], draws: usize) -> Vec<usize> {
    let mut random = StdRng::seed_from_u64(1);
    let mut counts = vec![0; candidates.len()];
    for _ in 0..draws {
        counts[policy.choose(candidates, &Ask::default(), &mut random).unwrap()] += 1;
    }
    counts
}

/// What holds for every policy.
#[test]
fn every_policy_chooses_a_candidate_if_there_is_one_and_spreads_equals() {
    for kind in PolicyKind::ALL {
        let policy = kind.build();
        assert_eq!(policy.kind(), kind);
        assert_eq!(policy.choose(&[], &Ask::default(), &mut StdRng::seed_from_u64(0)), None, "{kind:?}");
        assert_eq!(
            policy.choose(&[candidate(0, 9, 9, 9)], &Ask::default(), &mut StdRng::seed_from_u64(0)),
            Some(0),
            "{kind:?}"
        );
        let equals: Vec<_> = (0..4).map(|number| candidate(number, 100, 0, 0)).collect();
        for count in counts(&*policy, &equals, 4000) {
            assert!((850..1150).contains(&count), "{kind:?}: {count} of 4000 on one of four equals");
        }
        let huge = [candidate(0, u64::MAX, u64::MAX, u64::MAX), candidate(1, u64::MAX, u64::MAX, u64::MAX)];
        assert!(policy.choose(&huge, &Ask::default(), &mut StdRng::seed_from_u64(0)).is_some(), "{kind:?}");
    }
}

#[test]
fn names_parse_back_and_an_unknown_one_lists_them() {
    for kind in PolicyKind::ALL {
        assert_eq!(kind.name().parse(), Ok(kind));
    }
    let error = "magic".parse::<PolicyKind>().unwrap_err();
    assert!(
        error.message.contains("'magic'") && error.message.contains("cache_aware, least_load"),
        "{error}"
    );
}

#[test]
fn round_robin_takes_turns() {
    let policy = PolicyKind::RoundRobin.build();
    let three: Vec<_> = (0..3).map(|number| candidate(number, 0, 0, 0)).collect();
    let mut random = StdRng::seed_from_u64(0);
    let turns: Vec<_> = (0..6).filter_map(|_| policy.choose(&three, &Ask::default(), &mut random)).collect();
    assert_eq!(turns, [0, 1, 2, 0, 1, 2]);
}

#[test]
fn power_of_two_never_takes_the_busiest() {
    let policy = PolicyKind::PowerOfTwo.build();
    let counts =
        counts(&*policy, &[candidate(0, 0, 0, 1), candidate(1, 0, 0, 9), candidate(2, 0, 0, 2)], 1000);
    assert_eq!(counts[1], 0);
    assert!(counts[0] > counts[2], "{counts:?}");
}

#[test]
fn cache_aware_goes_to_the_prefix_until_load_outweighs_it() {
    let policy = PolicyKind::CacheAware.build();
    let choose =
        |holder_runs| counts(&*policy, &[candidate(0, 2000, 0, 0), candidate(1, 100, 0, holder_runs)], 100);
    assert_eq!(choose(0), [0, 100]);
    assert_eq!(choose(10), [0, 100]);
    assert_eq!(choose(60), [100, 0]);
    let queued = counts(&*policy, &[candidate(0, 2000, 0, 0), candidate(1, 100, 5000, 1)], 100);
    assert_eq!(queued, [100, 0]);
}

#[test]
fn cache_aware_keeps_a_hot_prefix_balanced_over_time() {
    // Every request lives for 32 arrivals; one prefix is everywhere, so load alone must decide.
    let policy = PolicyKind::CacheAware.build();
    let mut random = StdRng::seed_from_u64(3);
    let (mut running, mut served, mut live) = ([0_u64; 8], [0_usize; 8], std::collections::VecDeque::new());
    for _ in 0..8000 {
        let candidates: Vec<_> =
            (0..8).map(|number| candidate(number, 100, 0, running[number as usize])).collect();
        let chosen = policy.choose(&candidates, &Ask::default(), &mut random).unwrap();
        running[chosen] += 1;
        served[chosen] += 1;
        live.push_back(chosen);
        if live.len() > 32 {
            running[live.pop_front().unwrap()] -= 1;
        }
    }
    let most = *served.iter().max().unwrap() as f64;
    assert!(most / 1000.0 <= 1.06, "{served:?}");
}

#[test]
fn routing_miss_goes_to_the_idle() {
    for kind in
        [PolicyKind::CacheAware, PolicyKind::LeastLoad, PolicyKind::ConsistentHashing, PolicyKind::Sticky]
    {
        let counts = counts(&*kind.build(), &[candidate(0, 500, 0, 40), candidate(1, 500, 0, 0)], 100);
        assert_eq!(counts, [0, 100], "{kind:?}");
    }
}

#[test]
fn routing_imbalance_elsewhere_leaves_affinity_alone() {
    let with = |holder: usize| {
        let loads = [200, 0, 5, 5];
        let uncached = |number: usize| if number == holder { 400 } else { 4000 };
        let all: Vec<_> =
            (0..4).map(|number| candidate(number as u32, uncached(number), 0, loads[number])).collect();
        counts(&*PolicyKind::CacheAware.build(), &all, 100)
    };
    assert_eq!(with(2), [0, 0, 100, 0]);
    assert_eq!(with(0), [0, 100, 0, 0], "its own load is above what the prefix saves");
}

#[test]
fn a_worker_that_warms_up_gets_less_of_everything() {
    let cold = Candidate { speed: 0.1, ..candidate(0, 100, 0, 1) };
    let warm = candidate(1, 100, 0, 1);
    for kind in [PolicyKind::Random, PolicyKind::RoundRobin, PolicyKind::PowerOfTwo, PolicyKind::CacheAware] {
        let counts = counts(&*kind.build(), &[cold, warm], 1000);
        assert!(counts[0] < 250, "{kind:?}: {counts:?}");
    }
    assert_eq!(counts(&*PolicyKind::Random.build(), &[cold], 10), [10], "it is all there is");
}

#[test]
fn a_full_pool_repels_and_a_half_full_one_hardly() {
    let policy = PolicyKind::CacheAware.build();
    let pair = |usage: f64| [Candidate { usage, ..candidate(0, 0, 0, 0) }, candidate(1, 400, 0, 0)];
    assert_eq!(counts(&*policy, &pair(0.5), 100), [100, 0]);
    assert_eq!(counts(&*policy, &pair(0.95), 100), [0, 100]);
}

#[test]
fn a_conversation_waits_for_the_worker_that_has_it_and_not_for_ever() {
    let policy = PolicyKind::CacheAware.build();
    let pair = |queued: u64| {
        [candidate(0, 100, queued, 0), Candidate { copied_tokens: 1000, ..candidate(1, 1100, 0, 0) }]
    };
    assert_eq!(counts(&*policy, &pair(25_000), 100), [100, 0]);
    assert_eq!(counts(&*policy, &pair(28_000), 100), [0, 100], "the copy is the lesser evil");
}

#[test]
fn what_was_sent_lately_decides_among_equals_only() {
    let policy = PolicyKind::CacheAware.build();
    let busy = |uncached: u64| {
        [Candidate { surplus_tokens: 10_000, ..candidate(0, uncached, 0, 0) }, candidate(1, 2000, 0, 0)]
    };
    assert_eq!(counts(&*policy, &busy(2000), 100), [0, 100]);
    assert_eq!(counts(&*policy, &busy(1500), 100), [100, 0]);
    let newcomer = [Candidate { surplus_tokens: 1 << 40, ..candidate(0, 0, 0, 0) }, candidate(1, 600, 0, 0)];
    assert_eq!(counts(&*policy, &newcomer, 100), [100, 0], "a newcomer is not flooded");
}

#[test]
fn what_requests_are_expected_to_write_counts_within_bounds() {
    assert_eq!([0, 1, 64, 256, 512, 1024, u32::MAX].map(hinted_tokens), [-48, -48, -48, 0, 64, 192, 192]);
    let policy = PolicyKind::LeastLoad.build();
    let long = Candidate { hinted_tokens: hinted_tokens(2000), ..candidate(0, 0, 0, 1) };
    let short = Candidate { hinted_tokens: 3 * hinted_tokens(10), ..candidate(1, 0, 0, 3) };
    assert_eq!(counts(&*policy, &[long, short], 20), [0, 20], "three short ones are less than a long one");
    let plain = [candidate(0, 0, 0, 1), candidate(1, 0, 0, 3)];
    assert_eq!(counts(&*policy, &plain, 20), [20, 0]);
    let lied = Candidate { hinted_tokens: i64::MIN, ..candidate(0, 0, 0, 1) };
    assert_eq!(lied.load(), candidate(0, 0, 0, 0).load());
}

#[test]
fn a_fork_is_split_only_if_it_is_wider_than_a_worker() {
    assert_eq!([0, 1, 64, 65, 128, 200].map(fork_part), [1, 1, 1, 32, 64, 50]);
    let policy = PolicyKind::CacheAware.build();
    let fork = |width| {
        let shared_by = fork_part(width);
        let held = Candidate { shared_by, ..candidate(0, 20, 0, 8) };
        [held, Candidate { shared_by, copied_tokens: 2000, ..candidate(1, 2020, 0, 0) }]
    };
    assert_eq!(counts(&*policy, &fork(64), 20), [20, 0]);
    assert_eq!(counts(&*policy, &fork(128), 20), [0, 20]);
}
