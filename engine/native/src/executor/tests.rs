//! The sampler on rows made by hand; its agreement with the torch sampler is tested from Python.

use super::sample::{Plan, answer};
use crate::kernels::{Isa, Kernels, Rows};

fn rows() -> Rows {
    Rows::new(Kernels::of(Isa::Portable).expect("the portable kernels run anywhere"))
}

fn plan() -> Plan {
    Plan { top_k: -1, top_p: 1.0, ..Plan::default() }
}

#[test]
fn greedy_ties_go_to_the_lowest_id() {
    assert_eq!(answer(rows(), &[1.0, 7.0, 7.0, 3.0], &plan()).token, 1);
}

#[test]
fn top_k_of_one_is_greedy_at_any_temperature() {
    for seed in 0..50 {
        let plan = Plan { temperature: 5.0, top_k: 1, seed, ..plan() };
        assert_eq!(answer(rows(), &[0.0, 1.0, 0.9], &plan).token, 1);
    }
}

#[test]
fn draws_follow_the_probabilities() {
    let logits = [0.0f32, 2f32.ln(), f32::MIN];
    let drawn = (0..6000).filter(|&position| {
        let plan = Plan { temperature: 1.0, seed: 3, position, ..plan() };
        answer(rows(), &logits, &plan).token == 1
    });
    let share = drawn.count() as f64 / 6000.0;
    assert!((share - 2.0 / 3.0).abs() < 0.03, "{share}");
}

#[test]
fn nucleus_reaches_beyond_the_near_values_when_the_row_is_flat() {
    let mut logits = vec![0.0f32; 2000];
    logits[0] = 30.0;
    logits[1999] = 29.9;
    let seen: std::collections::BTreeSet<i64> = (0..200)
        .map(|position| {
            let plan = Plan { temperature: 60.0, top_p: 0.99, position, ..plan() };
            answer(rows(), &logits, &plan).token
        })
        .collect();
    assert!(seen.len() > 100, "{}", seen.len());
}

#[test]
fn row_that_is_not_finite_is_an_error_that_keeps_a_target() {
    let plan = Plan { target: Some(2), ..plan() };
    let outcome = answer(rows(), &[0.0, f32::NAN, 1.0], &plan);
    assert_eq!(outcome.token, 2);
    assert!(outcome.error.is_some_and(|error| error.contains("NaN or infinite")));
}
