use super::*;
use crate::proto::{Finish, PromptReport};
use proptest::prelude::*;
use std::task::Poll;

fn plain(index: u32, token: u32, text: &str) -> SequenceDelta {
    SequenceDelta { index, token_ids: vec![token], text: text.into(), ..Default::default() }
}

fn take(slot: &Slot) -> Option<Result<SequenceDelta, Error>> {
    match slot.poll_next(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(item) => item,
        Poll::Pending => None,
    }
}

#[test]
fn a_reader_that_keeps_up_sees_each_delta() {
    let slot = Slot::new(1, BufferLimits::default());
    for token in 0..MERGE_FROM as u32 {
        assert_eq!(slot.push(plain(0, token, "x")), Pushed::Open);
    }
    for token in 0..MERGE_FROM as u32 {
        assert_eq!(take(&slot).unwrap().unwrap().token_ids, [token]);
    }
    assert!(take(&slot).is_none());
}

#[test]
fn the_bytes_of_a_drained_queue_are_zero() {
    let slot = Slot::new(1, BufferLimits::default());
    for token in 0..100 {
        slot.push(plain(0, token, "abc"));
    }
    while take(&slot).is_some() {}
    assert_eq!(slot.state.lock().bytes, 0);
}

#[test]
fn deltas_with_more_than_tokens_are_not_merged_away() {
    let slot = Slot::new(1, BufferLimits::default());
    for token in 0..MERGE_FROM as u32 {
        slot.push(plain(0, token, "x"));
    }
    slot.push(SequenceDelta { input_logprobs: Some(TokenLogprobs::default()), ..Default::default() });
    slot.push(SequenceDelta { prompt: Some(PromptReport::default()), ..Default::default() });
    let kept: Vec<_> = std::iter::from_fn(|| take(&slot)).map(Result::unwrap).collect();
    assert_eq!(kept.iter().filter(|delta| delta.input_logprobs.is_some()).count(), 1);
    assert_eq!(kept.iter().filter(|delta| delta.prompt.is_some()).count(), 1);
}

#[test]
fn nothing_follows_the_end() {
    let slot = Slot::new(1, BufferLimits::default());
    let end = SequenceDelta { finish: Some(Finish::default()), ..Default::default() };
    assert_eq!(slot.push(end), Pushed::Ended);
    assert_eq!(slot.push(plain(0, 1, "late")), Pushed::Ended);
    slot.fail(Error::internal("too late"));
    assert!(take(&slot).unwrap().is_ok());
    assert!(take(&slot).is_none());
}

#[test]
fn more_deltas_than_the_bound_fail_the_request() {
    let slot = Slot::new(1, BufferLimits { deltas: 20, bytes: 1 << 20 });
    let prompt = || SequenceDelta { input_logprobs: Some(TokenLogprobs::default()), ..Default::default() };
    let outcomes: Vec<_> = (0..21).map(|_| slot.push(prompt())).collect();
    assert_eq!(outcomes[19..], [Pushed::Open, Pushed::Abandoned]);
}

proptest! {
    /// Whatever is merged, each sequence's ids, text and logprobs come out whole and in order.
    #[test]
    fn merging_loses_nothing(pushes in prop::collection::vec((0..3_u32, any::<bool>(), any::<bool>()), 0..300)) {
        let slot = Slot::new(4, BufferLimits::default());
        let mut wanted: [Vec<u32>; 3] = Default::default();
        let mut got: [(Vec<u32>, String, Vec<u32>); 3] = Default::default();
        let mut logged: [Vec<u32>; 3] = Default::default();
        let read = |got: &mut [(Vec<u32>, String, Vec<u32>); 3]| {
            let Some(Ok(delta)) = take(&slot) else { return false };
            let (ids, text, columns) = &mut got[delta.index as usize];
            ids.extend(delta.token_ids);
            text.push_str(&delta.text);
            columns.extend(delta.logprobs.into_iter().flat_map(|columns| columns.token_ids));
            true
        };
        for (token, (index, with_logprobs, reads)) in pushes.into_iter().enumerate() {
            let token = token as u32;
            let mut delta = plain(index, token, &format!("{token} "));
            if with_logprobs {
                delta.logprobs = Some(TokenLogprobs { token_ids: vec![token], logprobs: vec![0.0], ..Default::default() });
                logged[index as usize].push(token);
            }
            prop_assert_eq!(slot.push(delta), Pushed::Open);
            wanted[index as usize].push(token);
            if reads {
                read(&mut got);
            }
        }
        while read(&mut got) {}
        for index in 0..3 {
            let text: String = wanted[index].iter().map(|token| format!("{token} ")).collect();
            prop_assert_eq!(&got[index], &(wanted[index].clone(), text, logged[index].clone()));
        }
        prop_assert_eq!(slot.state.lock().bytes, 0);
    }
}
