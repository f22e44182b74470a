//! The routing policy as an option: its names come from crates/routing, the one list of policies.

use branchline_worker::PolicyKind;

use super::value::{Shape, Value, not_listed};

const NAMES: [&str; PolicyKind::ALL.len()] = {
    let mut names = [""; PolicyKind::ALL.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = PolicyKind::ALL[at].name();
        at += 1;
    }
    names
};

/// Names of the routing policies.
pub fn policy_names() -> &'static [&'static str] {
    &NAMES
}

impl Value for PolicyKind {
    const SHAPE: Shape = Shape::Choice(policy_names);

    fn parse(texts: &[String]) -> Result<Self, String> {
        let text = String::parse(texts)?;
        text.parse().map_err(|_| not_listed(&text, policy_names()))
    }
}
