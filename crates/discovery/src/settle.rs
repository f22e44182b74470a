//! What has to change so that the known workers are the wanted ones. Pure: two maps in, changes out; the level decides
//! and not the events that led to it, so that a lost event is made good by the next look.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::member::{Member, Phase};

/// Why a worker is taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// Its pod is being deleted.
    Leaving,
    /// Its pod is gone, over, without an address or no longer selected.
    Gone,
    /// Another pod has its address, or what was said of it has changed.
    Replaced,
}

impl Why {
    /// The word for logs and metrics.
    pub fn word(self) -> &'static str {
        match self {
            Self::Leaving => "leaving",
            Self::Gone => "gone",
            Self::Replaced => "replaced",
        }
    }
}

/// One step.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// A worker is there and takes requests.
    Add(Arc<Member>),
    /// No new request from now on; running ones may end within the time, or the usual one.
    Remove(Arc<Member>, Why, Option<Duration>),
    /// No new request until it is resumed; all else goes on.
    Hold(Arc<Member>),
    /// It takes requests again.
    Resume(Arc<Member>),
    /// Priority, cost or labels are others now.
    Update(Arc<Member>),
}

impl Change {
    /// The word for metrics.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Add(_) => "add",
            Self::Remove(_, why, _) => why.word(),
            Self::Hold(_) => "hold",
            Self::Resume(_) => "resume",
            Self::Update(_) => "update",
        }
    }

    /// The worker that it is about.
    pub fn member(&self) -> &Arc<Member> {
        match self {
            Self::Add(member)
            | Self::Remove(member, ..)
            | Self::Hold(member)
            | Self::Resume(member)
            | Self::Update(member) => member,
        }
    }
}

/// Workers by their address.
pub(crate) type Members = BTreeMap<String, Arc<Member>>;

/// One worker an address: of two pods the one that takes requests, else the younger. One pod that two selectors match
/// is one worker.
pub(crate) fn merge(all: impl IntoIterator<Item = Arc<Member>>) -> Members {
    let mut merged = Members::new();
    for member in all {
        let Some(old) = merged.get(&member.address) else {
            merged.insert(member.address.clone(), member);
            continue;
        };
        let winner = if old.uid == member.uid {
            let role = old.role.with(member.role);
            let newest = if member.phase >= old.phase { &member } else { old };
            Arc::new(Member { role, ..(**newest).clone() })
        } else {
            let rank = |one: &Member| (one.phase, one.born.clone(), one.uid.clone());
            if rank(&member) > rank(old) { member } else { Arc::clone(old) }
        };
        merged.insert(winner.address.clone(), winner);
    }
    merged
}

/// The steps from `known` to `wanted`; removals come first, so that an address is free before it is taken again.
pub(crate) fn settle(known: &Members, wanted: &Members) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut news = Vec::new();
    for (address, old) in known {
        match wanted.get(address) {
            None => changes.push(Change::Remove(Arc::clone(old), Why::Gone, None)),
            Some(new) if is_other(old, new) => {
                changes.push(Change::Remove(Arc::clone(old), Why::Replaced, None));
                news.extend(start(new));
            }
            Some(new) if new.phase == Phase::Leaving => {
                changes.push(Change::Remove(Arc::clone(new), Why::Leaving, new.grace));
            }
            Some(new) => news.extend(adjust(old, new)),
        }
    }
    let unknown = wanted.iter().filter(|(address, _)| !known.contains_key(*address));
    news.extend(unknown.filter_map(|(_, new)| start(new)));
    changes.extend(news);
    changes
}

fn start(new: &Arc<Member>) -> Option<Change> {
    // One that is not ready yet has nothing to tell; it is added when it is.
    (new.phase == Phase::Ready).then(|| Change::Add(Arc::clone(new)))
}

fn is_other(old: &Member, new: &Member) -> bool {
    old.uid != new.uid || old.role != new.role || old.traits != new.traits
}

fn adjust(old: &Member, new: &Arc<Member>) -> Vec<Change> {
    let mut changes = Vec::new();
    if (old.priority, old.cost, &old.labels) != (new.priority, new.cost, &new.labels) {
        changes.push(Change::Update(Arc::clone(new)));
    }
    match (old.phase, new.phase) {
        (Phase::Ready, Phase::Unready) => changes.push(Change::Hold(Arc::clone(new))),
        (Phase::Unready, Phase::Ready) => changes.push(Change::Resume(Arc::clone(new))),
        _ => {}
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::member::Traits;
    use branchline_core::Role;
    use proptest::prelude::*;

    fn member(address: &str, uid: &str, phase: Phase) -> Member {
        Member {
            address: address.to_owned(),
            uid: uid.to_owned(),
            namespace: "n".to_owned(),
            name: format!("pod-{uid}"),
            role: Role::Regular,
            phase,
            traits: Traits::default(),
            priority: None,
            cost: None,
            labels: BTreeMap::new(),
            born: String::new(),
            grace: None,
        }
    }

    fn set(members: &[Member]) -> Members {
        merge(members.iter().cloned().map(Arc::new))
    }

    /// The words of the steps, with their addresses.
    fn steps(known: &Members, wanted: &Members) -> Vec<(&'static str, String)> {
        settle(known, wanted).iter().map(|change| (change.word(), change.member().address.clone())).collect()
    }

    fn right(steps: &[(&'static str, &str)]) -> Vec<(&'static str, String)> {
        steps.iter().map(|(word, address)| (*word, (*address).to_owned())).collect()
    }

    use Phase::{Leaving, Ready, Unready};

    #[test]
    fn workers_come_when_they_are_ready_and_go_when_they_are_gone() {
        let known = set(&[member("a", "1", Ready), member("b", "2", Ready)]);
        let wanted = set(&[member("b", "2", Ready), member("c", "3", Ready), member("d", "4", Unready)]);
        assert_eq!(steps(&known, &wanted), right(&[("gone", "a"), ("add", "c")]));
        assert_eq!(steps(&known, &known), right(&[]));
        assert_eq!(steps(&set(&[]), &set(&[member("a", "1", Leaving)])), right(&[]), "it would be of no use");
    }

    #[test]
    fn readiness_holds_and_resumes_without_taking_out() {
        let (ready, unready) = (set(&[member("a", "1", Ready)]), set(&[member("a", "1", Unready)]));
        assert_eq!(steps(&ready, &unready), right(&[("hold", "a")]));
        assert_eq!(steps(&unready, &ready), right(&[("resume", "a")]));
    }

    #[test]
    fn a_leaving_worker_is_taken_out_with_its_pods_grace() {
        let mut leaving = member("a", "1", Leaving);
        leaving.grace = Some(Duration::from_secs(75));
        let changes = settle(&set(&[member("a", "1", Ready)]), &set(&[leaving.clone()]));
        assert_eq!(changes, [Change::Remove(Arc::new(leaving), Why::Leaving, Some(Duration::from_secs(75)))]);
    }

    #[test]
    fn another_pod_at_the_same_address_is_another_worker() {
        let (old, new) = (set(&[member("a", "1", Ready)]), set(&[member("a", "2", Ready)]));
        assert_eq!(steps(&old, &new), right(&[("replaced", "a"), ("add", "a")]));
        let starting = set(&[member("a", "2", Unready)]);
        assert_eq!(steps(&old, &starting), right(&[("replaced", "a")]));
    }

    #[test]
    fn what_cannot_change_while_connected_replaces_and_what_can_updates() {
        let old = member("a", "1", Ready);
        let mut other = old.clone();
        other.traits.model = Some("m".to_owned());
        assert_eq!(
            steps(&set(std::slice::from_ref(&old)), &set(&[other])),
            right(&[("replaced", "a"), ("add", "a")])
        );
        let mut labelled = old.clone();
        labelled.labels.insert("zone".to_owned(), "b".to_owned());
        labelled.phase = Unready;
        assert_eq!(steps(&set(&[old]), &set(&[labelled])), right(&[("update", "a"), ("hold", "a")]));
    }

    #[test]
    fn removals_come_before_additions() {
        let known = set(&[member("a", "1", Ready), member("b", "2", Ready)]);
        let wanted = set(&[member("a", "2", Ready), member("b", "1", Ready)]);
        let words: Vec<_> = steps(&known, &wanted).into_iter().map(|(word, _)| word).collect();
        assert_eq!(words, ["replaced", "replaced", "add", "add"]);
    }

    #[test]
    fn of_two_pods_at_one_address_the_one_that_takes_requests_wins_and_else_the_younger() {
        let born = |uid: &str, phase, born: &str| Member { born: born.to_owned(), ..member("a", uid, phase) };
        let uid = |members: &[Member]| set(members)["a"].uid.clone();
        for order in [[0, 1], [1, 0]] {
            let pick = |pair: [Member; 2]| uid(&[pair[order[0]].clone(), pair[order[1]].clone()]);
            assert_eq!(pick([born("1", Leaving, "2026-02"), born("2", Ready, "2026-01")]), "2");
            assert_eq!(pick([born("1", Ready, "2026-01"), born("2", Ready, "2026-02")]), "2");
            assert_eq!(pick([born("1", Unready, "2026-02"), born("2", Unready, "2026-01")]), "1");
        }
    }

    #[test]
    fn a_pod_of_two_selectors_is_one_worker_for_both_halves() {
        let with = |role| Member { role, ..member("a", "1", Ready) };
        let role = |one, two| set(&[with(one), with(two)])["a"].role;
        assert_eq!(role(Role::Prefill, Role::Decode), Role::Both);
        assert_eq!(role(Role::Regular, Role::Decode), Role::Decode);
        assert_eq!(role(Role::Prefill, Role::Regular), Role::Prefill);
        assert_eq!(role(Role::Decode, Role::Decode), Role::Decode);
    }

    proptest! {
        /// Carrying out the steps leads to exactly the ready workers and the known unready ones, whatever was before.
        #[test]
        fn the_steps_lead_to_what_is_wanted(
            known in prop::collection::vec((0..6usize, 0..3usize, 0..2usize), 0..8),
            wanted in prop::collection::vec((0..6usize, 0..3usize, 0..3usize), 0..8),
        ) {
            let phases = [Ready, Unready, Leaving];
            let build = |all: &[(usize, usize, usize)]| set(&all.iter().map(|(address, uid, phase)| {
                member(&format!("a{address}"), &format!("{uid}"), phases[*phase])
            }).collect::<Vec<_>>());
            let (mut fleet, wanted) = (build(&known), build(&wanted));
            for change in settle(&fleet.clone(), &wanted) {
                let member = change.member();
                match &change {
                    Change::Remove(..) => { prop_assert!(fleet.remove(&member.address).is_some()); }
                    Change::Add(_) => { prop_assert!(fleet.insert(member.address.clone(), Arc::clone(member)).is_none()); }
                    _ => { prop_assert!(fleet.insert(member.address.clone(), Arc::clone(member)).is_some()); }
                }
            }
            for (address, member) in &fleet {
                prop_assert_eq!(&wanted[address], member);
                prop_assert!(member.phase != Leaving);
            }
            for (address, member) in &wanted {
                prop_assert!(member.phase != Ready || fleet.contains_key(address));
            }
            prop_assert!(settle(&fleet, &wanted).is_empty(), "a second look finds nothing to do");
        }
    }
}
