//! `choices` of a score: continuations as texts or as token ids.

use branchline_core::{Error, Result};
use serde_json::Value;

use crate::Limits;
use crate::fields::{Fields, wrong};
use crate::prompt::{Prompt, text_prompt, token_prompt};

/// Most continuations of one score.
pub const MAX_CHOICES: usize = 1024;

/// A continuation.
pub type ChoiceInput = Prompt;

/// Reads `choices`.
///
/// # Errors
/// `InvalidArgument` naming the field, also for none and for too many.
pub fn read_choices(fields: &Fields<'_>, limits: Limits) -> Result<Vec<ChoiceInput>> {
    let path = fields.path("choices");
    let Some(items) = fields.array("choices")? else {
        return Err(Error::invalid(
            path.as_str(),
            format!("`{path}` is missing; send 1 to {MAX_CHOICES} texts"),
        ));
    };
    if !(1..=MAX_CHOICES).contains(&items.len()) {
        let message = format!("`{path}` has {} entries; send 1 to {MAX_CHOICES}", items.len());
        return Err(Error::invalid(path.as_str(), message));
    }
    let read = |(position, item): (usize, &Value)| {
        let path = format!("{path}[{position}]");
        match item {
            Value::String(text) => text_prompt(text, &path),
            Value::Array(ids) => token_prompt(ids, &path, limits),
            other => Err(wrong(&path, "a string or an array of token ids", other)),
        }
    };
    items.iter().enumerate().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(value: Value) -> Result<Vec<ChoiceInput>> {
        read_choices(
            &Fields::of(&value, "").unwrap(),
            Limits { vocab_size: 100, context_length: 10, pool_tokens: 10 },
        )
    }

    #[test]
    fn texts_and_ids_may_be_mixed() {
        let found = read(json!({"choices": ["a", [1, 2]]})).unwrap();
        assert_eq!(found, [Prompt::Text("a".into()), Prompt::Tokens(vec![1, 2])]);
    }

    #[test]
    fn what_is_no_choice_is_refused_with_its_place() {
        for (choices, field) in [
            (json!(null), "choices"),
            (json!([]), "choices"),
            (json!("a"), "choices"),
            (json!(vec!["a"; 1025]), "choices"),
            (json!(["a", 1]), "choices[1]"),
            (json!(["a", ""]), "choices[1]"),
            (json!([[1, 100]]), "choices[0][1]"),
        ] {
            let error = read(json!({"choices": choices})).expect_err(&choices.to_string());
            assert_eq!(error.field.as_deref(), Some(field), "{choices}");
        }
    }
}
