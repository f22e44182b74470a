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

/// The policy of one model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelPolicy(pub String, pub PolicyKind);

impl Value for ModelPolicy {
    const SHAPE: Shape = Shape::Text;

    fn parse(texts: &[String]) -> Result<Self, String> {
        let (model, policy) = pair(texts, "MODEL=POLICY")?;
        PolicyKind::parse(&[policy]).map(|policy| Self(model, policy))
    }
}

/// A further name of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelAlias(pub String, pub String);

impl Value for ModelAlias {
    const SHAPE: Shape = Shape::Text;

    fn parse(texts: &[String]) -> Result<Self, String> {
        pair(texts, "ALIAS=MODEL").map(|(alias, model)| Self(alias, model))
    }
}

fn pair(texts: &[String], form: &str) -> Result<(String, String), String> {
    let text = String::parse(texts)?;
    match text.rsplit_once('=') {
        Some((left, right)) if !left.is_empty() && !right.is_empty() => {
            Ok((left.to_owned(), right.to_owned()))
        }
        _ => Err(format!("'{text}' is not a pair; give it as {form}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_read_and_anything_else_is_refused_with_their_form() {
        let read = |text: &str| ModelPolicy::parse(&[text.to_owned()]);
        assert_eq!(read("org/m=least_load"), Ok(ModelPolicy("org/m".to_owned(), PolicyKind::LeastLoad)));
        for text in ["m", "=random", "m=", "m=magic"] {
            assert!(read(text).is_err(), "{text}");
        }
        let refused = ModelAlias::parse(&["gpt".to_owned()]).expect_err("no pair");
        assert!(refused.contains("ALIAS=MODEL"), "{refused}");
    }
}
