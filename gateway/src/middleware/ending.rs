//! How a stream ends that a module stopped: in the words of its API family, and well.

use branchline_plugins::NewEvent;
use serde_json::{Value, json};

use crate::http::Family;

/// Name and data of an event.
pub(super) type Pair = (Option<String>, String);

/// What an end is made of.
pub(super) struct Ending {
    family: Family,
    /// The response of the Responses API as its first event told it.
    opened: Option<Value>,
}

impl Ending {
    pub(super) fn of(path: &str) -> Self {
        Self { family: Family::of(path), opened: None }
    }

    /// Notes what an ending may need of an event.
    pub(super) fn note(&mut self, name: Option<&str>, data: &str) {
        if self.family == Family::Responses && name == Some("response.created") {
            let event = serde_json::from_str::<Value>(data).ok();
            self.opened = event.and_then(|mut event| event.get_mut("response").map(Value::take));
        }
    }

    /// The last events with something in them: the module's, or, if it gave none, what says that a filter ended it.
    pub(super) fn last(&self, given: Vec<NewEvent>, current: &str) -> Vec<Pair> {
        if !given.is_empty() {
            return given.into_iter().map(|event| (event.name, event.data)).collect();
        }
        let Ok(event) = serde_json::from_str::<Value>(current) else { return Vec::new() };
        match self.family {
            Family::Messages => filtered_message(&event, current),
            Family::Responses => Vec::new(),
            Family::Done | Family::Open => filtered_chunk(event).into_iter().collect(),
        }
    }

    /// What follows the last events so that clients see a whole stream.
    pub(super) fn mark(&self, last: &[Pair]) -> Option<Pair> {
        let named = |names: &[&str]| {
            last.iter().any(|(name, _)| name.as_deref().is_some_and(|name| names.contains(&name)))
        };
        match self.family {
            Family::Done if last.iter().any(|(_, data)| data == "[DONE]") => None,
            Family::Done => Some((None, "[DONE]".to_owned())),
            Family::Messages if named(&["message_stop", "error"]) => None,
            Family::Messages => Some(event("message_stop", json!({"type": "message_stop"}))),
            Family::Responses
                if named(&["response.completed", "response.incomplete", "response.failed", "error"]) =>
            {
                None
            }
            Family::Responses => {
                let mut response = self.opened.clone().unwrap_or_else(|| json!({"object": "response"}));
                response["status"] = json!("incomplete");
                response["incomplete_details"] = json!({"reason": "content_filter"});
                let name = "response.incomplete";
                Some(event(name, json!({"type": name, "response": response})))
            }
            Family::Open => None,
        }
    }
}

fn event(name: &str, data: Value) -> Pair {
    (Some(name.to_owned()), data.to_string())
}

/// A chunk of chat or completions with its content out and the reason in.
fn filtered_chunk(mut chunk: Value) -> Option<Pair> {
    let choices = chunk.get_mut("choices").and_then(Value::as_array_mut)?;
    for choice in choices.iter_mut().filter_map(Value::as_object_mut) {
        for (field, empty) in [("delta", json!({})), ("text", json!("")), ("logprobs", Value::Null)] {
            if let Some(value) = choice.get_mut(field) {
                *value = empty;
            }
        }
        choice.insert("finish_reason".to_owned(), json!("content_filter"));
    }
    Some((None, chunk.to_string()))
}

/// The end of a message: its open block is closed, and the reason given.
fn filtered_message(current: &Value, text: &str) -> Vec<Pair> {
    let kind = current["type"].as_str().unwrap_or_default();
    let before = match kind {
        "content_block_delta" => {
            let name = "content_block_stop";
            Some(event(name, json!({"type": name, "index": current["index"]})))
        }
        // Nothing of the answer is in these.
        "message_start" | "content_block_stop" => Some((Some(kind.to_owned()), text.to_owned())),
        _ => None,
    };
    let name = "message_delta";
    let delta = json!({"stop_reason": "refusal", "stop_sequence": null});
    let reason = event(name, json!({"type": name, "delta": delta, "usage": {"output_tokens": 0}}));
    before.into_iter().chain([reason]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(name: Option<&str>, data: &str) -> Vec<NewEvent> {
        vec![NewEvent { name: name.map(str::to_owned), data: data.to_owned() }]
    }

    #[test]
    fn a_chat_stopped_without_events_keeps_its_chunk_and_says_content_filter() {
        let ending = Ending::of("/v1/chat/completions");
        let chunk = r#"{"id":"c","choices":[{"index":0,"delta":{"content":"bad"},"finish_reason":null}]}"#;
        let last = ending.last(Vec::new(), chunk);
        let clean = r#"{"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"content_filter"}]}"#;
        assert_eq!(last, [(None, clean.to_owned())]);
        assert_eq!(ending.mark(&last), Some((None, "[DONE]".to_owned())));
        let own = ending.last(given(None, "[DONE]"), chunk);
        assert_eq!(ending.mark(&own), None, "no second end mark");
        assert!(ending.last(Vec::new(), "[DONE]").is_empty());
    }

    #[test]
    fn a_message_is_closed_block_by_block() {
        let ending = Ending::of("/v1/messages");
        let names = |current: &str| {
            let last = ending.last(Vec::new(), current);
            let end = ending.mark(&last);
            last.into_iter().chain(end).map(|(name, _)| name.expect("a name")).collect::<Vec<_>>()
        };
        let delta = r#"{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"bad"}}"#;
        assert_eq!(names(delta), ["content_block_stop", "message_delta", "message_stop"]);
        assert_eq!(names(r#"{"type":"content_block_start","index":0}"#), ["message_delta", "message_stop"]);
        assert_eq!(names(r#"{"type":"message_start"}"#), ["message_start", "message_delta", "message_stop"]);
        let closed = ending.last(Vec::new(), delta);
        assert_eq!(closed[0].1, r#"{"type":"content_block_stop","index":1}"#);
        assert!(closed[1].1.contains(r#""stop_reason":"refusal""#) && !closed[1].1.contains("bad"));
        assert_eq!(ending.mark(&ending.last(given(Some("message_stop"), "{}"), delta)), None);
    }

    #[test]
    fn a_response_ends_incomplete_under_its_own_id() {
        let mut ending = Ending::of("/v1/responses");
        ending.note(Some("response.created"), r#"{"response":{"id":"resp_1","status":"in_progress"}}"#);
        assert!(ending.last(Vec::new(), r#"{"type":"response.output_text.delta","delta":"bad"}"#).is_empty());
        let (name, data) = ending.mark(&[]).expect("an end");
        assert_eq!(name.as_deref(), Some("response.incomplete"));
        let data: Value = serde_json::from_str(&data).expect("JSON");
        assert_eq!(
            (&data["response"]["id"], &data["response"]["status"]),
            (&json!("resp_1"), &json!("incomplete"))
        );
        assert_eq!(data["response"]["incomplete_details"]["reason"], "content_filter");
        assert_eq!(ending.mark(&[(Some("response.failed".to_owned()), "{}".to_owned())]), None);
    }

    #[test]
    fn what_is_no_known_family_ends_with_its_connection() {
        assert_eq!(Ending::of("/v1/audio/speech").mark(&[]), None);
    }
}
