//! What the two halves of a request are told beside what the client said: members put into its body's bytes.
//!
//! SGLang's wire: `bootstrap_host`, `bootstrap_port`, `bootstrap_room`, one value or one a prompt. vLLM's wire:
//! `kv_transfer_params`. Clients can't send any of them (see `peek`).

use std::sync::Arc;

use branchline_worker::Worker;
use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::peek::Peek;
use crate::dispatch::{Room, RoomRange, Rooms};

/// Where the halves of a request meet: one room a prompt, live as long as this.
pub(super) struct Meeting {
    rooms: Vec<Room>,
    host: Option<String>,
    port: Option<u16>,
    /// Names of the prompts, to abort them by.
    ids: Vec<String>,
    names: bool,
    is_batch: bool,
    rank: Option<u32>,
}

impl Meeting {
    /// Rooms for each prompt of a body at this prefill worker.
    pub(super) fn new(rooms: &Arc<Rooms>, prefill: &Worker, found: &Peek<'_>, range: RoomRange) -> Self {
        let spec = prefill.spec();
        let batch = batch(found);
        let ranks = spec.dp_size;
        let rank = (ranks > 1).then(|| rand::random::<u32>() % ranks);
        let reserve = || rooms.reserve(range, rank.unwrap_or(0), ranks);
        let rooms: Vec<Room> = (0..batch.unwrap_or(1)).map(|_| reserve()).collect();
        let ids = match &found.rid {
            Some(rid) => vec![rid.clone().into_owned()],
            None => rooms.iter().map(|room| format!("pd-{:016x}", room.number())).collect(),
        };
        Self {
            host: prefill.host_and_port().map(|(host, _)| host),
            port: spec.bootstrap_port,
            names: found.rid.is_none() && !found.has_rids,
            ids,
            is_batch: batch.is_some(),
            rooms,
            rank,
        }
    }

    /// By what the workers know the prompts.
    pub(super) fn ids(&self) -> &[String] {
        &self.ids
    }

    /// The client's body with what a half must know.
    pub(super) fn body(&self, body: &Bytes, prefill: bool) -> Bytes {
        let numbers: Vec<u64> = self.rooms.iter().map(Room::number).collect();
        let mut members = Map::new();
        let mut put = |name: &str, each: Value, all: Value| {
            let value = if self.is_batch { all } else { each };
            members.insert(name.to_owned(), value);
        };
        put("bootstrap_host", json!(self.host), json!(vec![&self.host; numbers.len()]));
        put("bootstrap_port", json!(self.port), json!(vec![self.port; numbers.len()]));
        put("bootstrap_room", json!(numbers[0]), json!(numbers));
        if self.names {
            put("rid", json!(self.ids[0]), json!(self.ids));
        }
        if let Some(rank) = self.rank {
            let name = if prefill { "routed_dp_rank" } else { "disagg_prefill_dp_rank" };
            members.insert(name.to_owned(), json!(rank));
        }
        append(body, &members)
    }
}

/// How many prompts a body holds, if it holds a list of them: strings or lists of ids, or `n` choices of one chat.
fn batch(found: &Peek<'_>) -> Option<usize> {
    let prompts = serde_json::from_slice::<Vec<Value>>(found.text).ok();
    let prompts = prompts.filter(|all| all.first().is_some_and(|one| one.is_string() || one.is_array()));
    let count = prompts.as_ref().map_or(1, Vec::len) * found.choices.max(1);
    (prompts.is_some() || found.choices > 1).then_some(count.max(1))
}

/// The body with further members at its end, where they count even if the client sent an empty one of the name.
fn append(body: &Bytes, members: &Map<String, Value>) -> Bytes {
    let Some(end) = body.iter().rposition(|byte| !byte.is_ascii_whitespace()) else { return body.clone() };
    if body[end] != b'}' || members.is_empty() {
        return body.clone();
    }
    let inside = body[..end].iter().rfind(|byte| !byte.is_ascii_whitespace());
    let text = Value::Object(members.clone()).to_string();
    let mut made = Vec::with_capacity(body.len() + text.len() + 1);
    made.extend_from_slice(&body[..end]);
    if inside.is_some_and(|byte| *byte != b'{') {
        made.push(b',');
    }
    made.extend_from_slice(&text.as_bytes()[1..]);
    Bytes::from(made)
}

/// vLLM's first request: the prompt and one token, and the transfer's id if the connector wants one from us. `None` if
/// the body is no object.
pub(super) fn prompt_only(body: &[u8], prefill: &Worker) -> Option<(Bytes, Option<String>)> {
    let mut all: Map<String, Value> = serde_json::from_slice(body).ok()?;
    let spec = prefill.spec();
    let id = (spec.kv_connector.as_deref() == Some("mooncake"))
        .then(|| format!("xfer-{:032x}", rand::random::<u128>()));
    all.insert("max_tokens".to_owned(), json!(1));
    if all.contains_key("max_completion_tokens") {
        all.insert("max_completion_tokens".to_owned(), json!(1));
    }
    all.insert("n".to_owned(), json!(1));
    all.insert("stream".to_owned(), json!(false));
    for name in ["stream_options", "min_tokens", "best_of"] {
        all.remove(name);
    }
    let mut parameters = json!({
        "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null,
        "remote_host": null, "remote_port": null,
    });
    if let Some(id) = &id {
        parameters["transfer_id"] = json!(id);
    }
    all.insert("kv_transfer_params".to_owned(), parameters);
    Some((Bytes::from(Value::Object(all).to_string()), id))
}

/// What the first answer tells the second half; for Mooncake, what it does not tell is known from the registration.
pub(super) fn parameters(answer: &[u8], prefill: &Worker, id: Option<&str>) -> Value {
    let answer: Value = serde_json::from_slice(answer).unwrap_or(Value::Null);
    let mut given = answer.get("kv_transfer_params").cloned().unwrap_or(Value::Null);
    let Some(id) = id else { return given };
    let spec = prefill.spec();
    if !given.is_object() {
        given = json!({});
    }
    let mut put = |name: &str, value: Value| {
        if given.get(name).is_none_or(Value::is_null) && !value.is_null() {
            given[name] = value;
        }
    };
    put("transfer_id", json!(id));
    put("remote_engine_id", json!(spec.kv_engine_id));
    let host = prefill.host_and_port().map(|(host, _)| host);
    put(
        "remote_bootstrap_addr",
        json!(host.zip(spec.bootstrap_port).map(|(host, port)| format!("{host}:{port}"))),
    );
    given["do_remote_prefill"] = json!(true);
    given["do_remote_decode"] = json!(false);
    given
}

/// The client's body with the second half's parameters; as it was if there are none, so that the prompt is computed
/// again there.
pub(super) fn with_parameters(body: &Bytes, parameters: &Value) -> Bytes {
    match parameters.is_object() {
        true => append(body, &Map::from_iter([("kv_transfer_params".to_owned(), parameters.clone())])),
        false => body.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::peek::peek;
    use super::*;

    fn appended(body: &str) -> String {
        let members = Map::from_iter([("bootstrap_room".to_owned(), json!(7))]);
        String::from_utf8(append(&Bytes::copy_from_slice(body.as_bytes()), &members).to_vec()).unwrap()
    }

    #[test]
    fn members_are_put_at_the_end_and_every_other_byte_stays() {
        assert_eq!(appended(r#"{"a": 1.50 }"#), r#"{"a": 1.50 ,"bootstrap_room":7}"#);
        assert_eq!(appended(" { } \n"), r#" { "bootstrap_room":7}"#);
        assert_eq!(appended(r#"{"bootstrap_room":null}"#), r#"{"bootstrap_room":null,"bootstrap_room":7}"#);
        for other in ["", "[]", "{", "null"] {
            assert_eq!(appended(other), other);
        }
    }

    #[test]
    fn a_list_of_prompts_needs_a_room_each_and_one_prompt_needs_one() {
        for (body, rooms) in [
            (r#"{"prompt":"x"}"#, None),
            (r#"{"input_ids":[1,2,3]}"#, None),
            (r#"{"messages":[{"role":"user","content":"x"}]}"#, None),
            (r#"{"prompt":["x","y","z"]}"#, Some(3)),
            (r#"{"text":["x"]}"#, Some(1)),
            (r#"{"input_ids":[[1],[2,3]]}"#, Some(2)),
            (r#"{"messages":[{"role":"user"}],"n":4}"#, Some(4)),
            (r#"{"prompt":["x","y"],"n":3}"#, Some(6)),
        ] {
            assert_eq!(batch(&peek(body.as_bytes())), rooms, "{body}");
        }
    }

    #[test]
    fn what_no_parameters_came_for_is_sent_as_it_was() {
        let body = Bytes::from_static(br#"{"prompt":"x"}"#);
        assert_eq!(with_parameters(&body, &Value::Null), body);
        let text = with_parameters(&body, &json!({"remote_host": "a"}));
        assert_eq!(&text[..], br#"{"prompt":"x","kv_transfer_params":{"remote_host":"a"}}"#);
    }
}
