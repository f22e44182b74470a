use super::*;
use serde_json::json;

const LIMITS: Limits = Limits { vocab_size: 49152, context_length: 2048, pool_tokens: 2048 };

fn read(value: Value) -> Result<GenerateRequest> {
    GenerateRequest::read(&Fields::of(&value, "").unwrap(), LIMITS)
}

fn field(value: Value) -> String {
    read(value.clone()).expect_err(&value.to_string()).field.unwrap_or_default()
}

#[test]
fn single_and_batch_prompts_are_told_apart() {
    assert!(!read(json!({"text": "a"})).unwrap().batch);
    assert!(!read(json!({"input_ids": [1, 2]})).unwrap().batch);
    assert!(read(json!({"text": ["a"]})).unwrap().batch);
    let batch = read(json!({"input_ids": [[1], [2, 3]]})).unwrap();
    assert_eq!(batch.items[1].prompt, Prompt::Tokens(vec![2, 3]));
}

#[test]
fn ids_outside_the_vocabulary_are_refused() {
    for (ids, good) in [
        (json!([-1]), false),
        (json!([49152]), false),
        (json!([200_000]), false),
        (json!([0, 49151]), true),
        (json!([1, 2.5]), false),
        (json!(["1"]), false),
        (json!([]), false),
        (json!([[]]), false),
        (json!([[1], [-1]]), false),
    ] {
        assert_eq!(read(json!({"input_ids": ids})).is_ok(), good, "{ids}");
    }
}

#[test]
fn sampling_params_may_be_one_for_all_or_one_each() {
    let one = read(json!({"text": ["a", "b"], "sampling_params": {"max_new_tokens": 3}})).unwrap();
    assert!(one.items.iter().all(|item| item.sampling.max_tokens == Some(3)));
    let each =
        read(json!({"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 3}, {"n": 2}]})).unwrap();
    assert_eq!(each.items[1].sampling.n, Some(2));
    let error = read(json!({"text": ["a", "b"], "sampling_params": [{}]})).unwrap_err();
    assert_eq!(error.message, "`sampling_params` has 1 entry for 2 prompts; send one for each");
    assert_eq!(field(json!({"text": "a", "sampling_params": [{}]})), "sampling_params");
    assert_eq!(
        field(json!({"text": ["a", "b"], "sampling_params": [{}, {"temperature": -1}]})),
        "sampling_params[1].temperature"
    );
}

#[test]
fn constraints_are_read_beside_and_inside_sampling_params() {
    for (name, value) in [
        ("regex", json!("x")),
        ("ebnf", json!("x")),
        ("json_schema", json!({})),
        ("structural_tag", json!({})),
    ] {
        let constraint =
            |body: Value| read(body).unwrap().items[0].sampling.constraint.clone().unwrap().field;
        let inside = json!({"text": "a", "sampling_params": {name: value}});
        assert_eq!(constraint(inside), format!("sampling_params.{name}"));
        assert_eq!(constraint(json!({"text": "a", name: value})), name);
        assert_eq!(field(json!({"text": "a", name: value, "sampling_params": {"regex": "x"}})), name);
    }
    assert_eq!(
        field(json!({"text": "a", "sampling_params": {"stop_regex": "x"}})),
        "sampling_params.stop_regex"
    );
}

#[test]
fn sequences_over_all_prompts_are_bounded() {
    let many = |prompts: usize| json!({"text": vec!["a"; prompts], "sampling_params": {"n": 128}});
    assert!(read(many(8)).is_ok());
    assert_eq!(field(many(9)), "sampling_params.n");
    assert_eq!(field(json!({"text": "a", "lora_path": 7})), "lora_path");
    assert_eq!(
        field(json!({"text": "a", "sampling_params": {"lora_path": "x"}})),
        "sampling_params.lora_path"
    );
}

#[test]
fn logprob_options_follow_return_logprob() {
    let request =
        read(json!({"text": "a", "return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": 2,
        "token_ids_logprob": [5, 6]}))
        .unwrap();
    let logprobs = request.items[0].logprobs.as_ref().unwrap();
    assert_eq!(
        (logprobs.input_start, logprobs.top, logprobs.token_ids.as_slice()),
        (Some(0), 2, &[5, 6][..])
    );
    let output = read(json!({"text": "a", "return_logprob": true})).unwrap();
    assert_eq!(output.items[0].logprobs.as_ref().unwrap().input_start, None);
    assert_eq!(field(json!({"text": "a", "top_logprobs_num": 2})), "top_logprobs_num");
    assert_eq!(field(json!({"text": "a", "token_ids_logprob": [1]})), "token_ids_logprob");
    assert_eq!(
        field(json!({"text": "a", "return_logprob": true, "logprob_start_len": -2})),
        "logprob_start_len"
    );
    let batch =
        read(json!({"text": ["a", "b"], "return_logprob": [true, false], "token_ids_logprob": [[1], null]}));
    let batch = batch.unwrap();
    assert_eq!(batch.items[0].logprobs.as_ref().unwrap().token_ids, [1]);
    assert_eq!(batch.items[1].logprobs, None);
}

#[test]
fn ids_are_given_one_each_or_derived() {
    let ids = |value: Value| read(value).unwrap().items.into_iter().map(|item| item.rid).collect::<Vec<_>>();
    assert_eq!(ids(json!({"text": "a", "rid": "r"})), [Some("r".into())]);
    assert_eq!(ids(json!({"text": ["a", "b"], "rid": ["x", "y"]})), [Some("x".into()), Some("y".into())]);
    assert_eq!(ids(json!({"text": ["a", "b"], "rid": "r"})), [Some("r_0".into()), Some("r_1".into())]);
    assert_eq!(field(json!({"text": ["a", "b"], "rid": ["x"]})), "rid");
    assert_eq!(field(json!({"text": "a", "rid": 7})), "rid");
}

#[test]
fn exactly_one_kind_of_prompt_is_taken() {
    assert_eq!(field(json!({})), "text");
    assert_eq!(field(json!({"text": "a", "input_ids": [1]})), "text");
    assert_eq!(field(json!({"text": ""})), "text");
    assert_eq!(field(json!({"text": []})), "text");
    assert_eq!(field(json!({"input_embeds": [[0.5]]})), "input_embeds");
}

#[test]
fn max_new_tokens_zero_plants_a_prefix() {
    let request = read(json!({"text": "a", "sampling_params": {"max_new_tokens": 0}})).unwrap();
    assert_eq!(request.items[0].sampling.max_tokens, Some(0));
}

#[test]
fn an_id_that_stands_twice_in_a_batch_is_refused_by_name() {
    let error = read(json!({"text": ["a", "b", "c"], "rid": ["x", null, "x"]})).unwrap_err();
    assert_eq!(
        (error.code, error.field.as_deref()),
        (branchline_core::ErrorCode::InvalidArgument, Some("rid"))
    );
    assert!(error.message.contains("\"x\""), "{}", error.message);
    assert!(read(json!({"text": ["a", "b"], "rid": [null, null]})).is_ok());
    assert!(read(json!({"text": ["a", "b"], "rid": ["x", "y"]})).is_ok());
}
