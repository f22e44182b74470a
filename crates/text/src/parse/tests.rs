//! The cases of tool calls and reasoning, and the law of all parsers: any cutting of a text gives the same events.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

mod faults;

const CASES: &str = include_str!("../../../../tests/cases/tools.jsonl");

fn case(id: &str) -> Value {
    CASES
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .find(|case| case["id"] == id)
        .unwrap_or_else(|| panic!("no case {id}"))
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// Neighbours joined over all pieces.
fn parse(format: &str, tools: &[&str], pieces: &[&str]) -> Vec<ToolEvent> {
    let mut parser = ToolFormat::named(format).unwrap().parser(&names(tools));
    let mut joined = ToolEvents::default();
    let mut add = |mut events: ToolEvents| {
        for event in events.drain() {
            match event {
                ToolEvent::Text(text) => joined.text(&text),
                ToolEvent::Call { name } => joined.call(name),
                ToolEvent::Arguments(json) => joined.arguments(&json),
            }
        }
    };
    for piece in pieces {
        let mut events = ToolEvents::default();
        parser.push(piece, &mut events).unwrap();
        add(events);
    }
    let mut events = ToolEvents::default();
    parser.finish(&mut events).unwrap();
    add(events);
    joined.into_vec()
}

fn characters(text: &str) -> Vec<&str> {
    text.char_indices().map(|(at, character)| &text[at..at + character.len_utf8()]).collect()
}

/// Parses with every chunking that matters, which must agree.
fn parse_all_ways(format: &str, tools: &[&str], text: &str) -> Vec<ToolEvent> {
    let whole = parse(format, tools, &[text]);
    assert_eq!(parse(format, tools, &characters(text)), whole, "{format} {text:?}");
    for (at, _) in text.char_indices() {
        assert_eq!(parse(format, tools, &[&text[..at], &text[at..]]), whole, "{format} {text:?} cut at {at}");
    }
    whole
}

/// Content, and calls with parsed arguments.
fn read(events: &[ToolEvent]) -> (String, Vec<(String, Value)>) {
    let (mut content, mut calls) = (String::new(), Vec::<(String, String)>::new());
    for event in events {
        match event {
            ToolEvent::Text(text) => content.push_str(text),
            ToolEvent::Call { name } => calls.push((name.clone(), String::new())),
            ToolEvent::Arguments(json) => calls.last_mut().expect("a call first").1.push_str(json),
        }
    }
    let parsed = |(name, json): (String, String)| {
        let value = serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error}: {json:?}"));
        (name, value)
    };
    (content, calls.into_iter().map(parsed).collect())
}

fn think(format: &str, opened: bool, pieces: &[&str]) -> [String; 2] {
    let mut parser = ReasoningFormat::named(format).unwrap().parser(opened, false);
    let mut events = ReasoningEvents::default();
    pieces.iter().for_each(|piece| parser.push(piece, &mut events).unwrap());
    parser.finish(&mut events).unwrap();
    let mut out = [String::new(), String::new()];
    for event in events.into_vec() {
        match event {
            ReasoningEvent::Reasoning(text) => {
                assert!(out[1].is_empty(), "reasoning after the answer");
                out[0].push_str(&text);
            }
            ReasoningEvent::Text(text) => out[1].push_str(&text),
        }
    }
    out
}

#[test]
fn tools_two_calls_in_one_piece() {
    let case = case("tools-two-calls-in-one-piece");
    let text = case["given"]["text"].as_str().unwrap();
    let (content, calls) = read(&parse_all_ways("hermes", &["get_weather", "get_time"], text));
    let wanted: Vec<_> = case["right"]["calls"].as_array().unwrap().iter().collect();
    assert_eq!(content.trim(), case["right"]["content_stripped"].as_str().unwrap());
    assert_eq!(calls.len(), wanted.len());
    for ((name, arguments), wanted) in calls.iter().zip(wanted) {
        assert_eq!((json!(name), arguments), (wanted["name"].clone(), &wanted["arguments"]));
    }
}

#[test]
fn tools_no_empty_name_and_clean_pool() {
    let case = case("tools-no-empty-name-and-clean-pool");
    let text = case["given"]["a"]["text"].as_str().unwrap();
    let events = parse("hermes", &["search"], &characters(text));
    let told: Vec<_> = events.iter().filter(|event| matches!(event, ToolEvent::Call { .. })).collect();
    assert_eq!(told, [&ToolEvent::Call { name: "search".into() }]);
    // Parsers are made anew, so that an aborted request leaves nothing behind.
    let begun = case["given"]["b"]["first_request_aborted_after"].as_str().unwrap();
    let mut aborted = ToolFormat::named("hermes").unwrap().parser(&[]);
    aborted.push(begun, &mut ToolEvents::default()).unwrap();
    assert_eq!(parse("hermes", &[], &["plain words"]), [ToolEvent::Text("plain words".into())]);
}

#[test]
fn tools_json_answer_is_content() {
    let case = case("tools-json-answer-is-content");
    for text in case["given"]["texts"].as_array().unwrap() {
        let text = text.as_str().unwrap();
        for format in ["llama3_json", "json"] {
            let events = parse_all_ways(format, &["get_weather"], text);
            assert_eq!(events, [ToolEvent::Text(text.to_owned())]);
        }
    }
}

#[test]
fn tools_reasoning_tail_kept() {
    let case = case("tools-reasoning-tail-kept");
    let texts = case["given"]["texts"].as_array().unwrap();
    for (text, right) in texts.iter().zip(case["right"]["reasoning_and_content"].as_array().unwrap()) {
        let text = text.as_str().unwrap();
        for format in ["qwen3", "deepseek_r1"] {
            for (at, _) in text.char_indices() {
                assert_eq!(
                    json!(think(format, false, &[&text[..at], &text[at..]])),
                    *right,
                    "{text} at {at}"
                );
            }
        }
    }
}

#[test]
fn tools_argument_types() {
    let case = case("tools-argument-types");
    let texts = case["given"]["texts"].as_array().unwrap();
    for (text, right) in texts.iter().zip(case["right"]["arguments"].as_array().unwrap()) {
        let (_, calls) = read(&parse_all_ways("hermes", &["get", "ping"], text.as_str().unwrap()));
        let arguments: Vec<_> = calls.into_iter().map(|(_, arguments)| arguments).collect();
        assert_eq!(json!(arguments), *right);
    }
}

/// Every form, with what it must say of a text.
#[test]
fn every_form_reads_its_own_calls() {
    let oslo = || ("get_weather".to_owned(), json!({"city": "Oslo"}));
    let utc = || ("get_time".to_owned(), json!({"tz": "UTC", "n": [1, null, true]}));
    let object = r#"{"name": "get_weather", "arguments": {"city": "Oslo"}}"#;
    let second = r#"{"parameters": {"tz": "UTC", "n": [1, null, true]}, "name": "get_time"}"#;
    let deepseek = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n\
                    {\"city\": \"Oslo\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n\
                    ```json\n{\"tz\": \"UTC\", \"n\": [1, null, true]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let newer = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Oslo\"}\
                 <｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{\"tz\": \"UTC\", \"n\": [1, null, true]}\
                 <｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let python = "[get_weather(city=\"Oslo\"), get_time(tz='UTC', n=[1, None, True])]";
    for (format, text) in [
        ("hermes", format!("<tool_call>\n{object}\n</tool_call>\n<tool_call>{second}</tool_call>\n")),
        ("qwen", format!("<tool_call>{object}<tool_call>{second}")),
        ("json", format!("[{object},\n {second}]")),
        ("json", format!("{object}\n{second}")),
        ("llama3_json", format!("<|python_tag|>{object}; {second}")),
        ("llama3_json", format!("{object}{second}")),
        ("mistral", format!("[TOOL_CALLS] [{object}, {second}]")),
        (
            "mistral",
            "[TOOL_CALLS]get_weather[ARGS]{\"city\": \"Oslo\"}[TOOL_CALLS]get_time[CALL_ID]a1B[ARGS]{\"tz\": \
             \"UTC\", \"n\": [1, null, true]}"
                .to_owned(),
        ),
        ("pythonic", python.to_owned()),
        ("pythonic", format!("<|python_start|>{python}<|python_end|>")),
        ("deepseek_v3", deepseek.to_owned()),
        ("deepseek_r1", deepseek.to_owned()),
        ("deepseek_v31", newer.to_owned()),
    ] {
        let (content, calls) = read(&parse_all_ways(format, &["get_weather", "get_time"], &text));
        assert_eq!(content, "", "{format} {text}");
        assert_eq!(calls, [oslo(), utc()], "{format} {text}");
    }
}

#[test]
fn text_around_calls_is_kept_without_the_white_space_at_them() {
    let call = r#"<tool_call>{"name": "f", "arguments": {}}</tool_call>"#;
    let events = parse_all_ways("hermes", &["f"], &format!(" I look.\n\n{call}\n\nDone. "));
    assert_eq!(
        events,
        [
            ToolEvent::Text(" I look.".into()),
            ToolEvent::Call { name: "f".into() },
            ToolEvent::Arguments("{}".into()),
            ToolEvent::Text("\n\nDone.".into()),
        ]
    );
    assert_eq!(parse_all_ways("hermes", &["f"], "just text \n"), [ToolEvent::Text("just text \n".into())]);
}

#[test]
fn arguments_as_a_string_null_or_nothing_become_an_object() {
    for (arguments, wanted) in [
        (r#", "arguments": "{\"a\": 1}""#, json!({"a": 1})),
        (r#", "arguments": null"#, json!({})),
        (r#", "arguments": "" "#, json!({})),
        ("", json!({})),
    ] {
        let text = format!(r#"<tool_call>{{"name": "f"{arguments}}}</tool_call>"#);
        assert_eq!(read(&parse_all_ways("hermes", &["f"], &text)).1, [("f".into(), wanted)], "{text}");
    }
}

#[test]
fn what_is_cut_off_before_its_name_is_text_and_after_it_a_part_of_a_call() {
    for (format, text) in [
        ("hermes", "<tool_call>\n{\"name\": \"se"),
        ("hermes", "<tool_c"),
        ("mistral", "[TOOL_CALLS] [{\"na"),
        ("json", "{\"name\": \"get_we"),
        ("json", "[{\"name\": "),
        ("pythonic", "[get_wea"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get"),
    ] {
        assert_eq!(parse_all_ways(format, &["get_weather"], text), [ToolEvent::Text(text.to_owned())]);
    }
    let events = parse_all_ways(
        "hermes",
        &["save"],
        "<tool_call>\n{\"name\": \"save\", \"arguments\": {\"note\": \"abc",
    );
    let arguments = ToolEvent::Arguments("{\"note\": \"abc".into());
    assert_eq!(events, [ToolEvent::Call { name: "save".into() }, arguments]);
}

#[test]
fn bare_json_of_other_tools_or_with_foreign_keys_is_an_answer() {
    for text in [
        r#"{"name": "Bob", "parameters": {}}"#,
        r#"{"name": "get_weather", "age": 4}"#,
        r#"[{"name": "get_weather", "rain": 4}]"#,
        "[]",
        "[1, 2]",
        r#"Say: {"name": "get_weather", "parameters": {}}"#,
    ] {
        assert_eq!(parse_all_ways("json", &["get_weather"], text), [ToolEvent::Text(text.to_owned())]);
    }
    for text in ["[1, 2]", "[other(a=1)]", "[get_weather]", "See [get_weather(a=1)]"] {
        assert_eq!(parse_all_ways("pythonic", &["get_weather"], text), [ToolEvent::Text(text.to_owned())]);
    }
}

#[test]
fn reasoning_may_begin_in_the_prompt_or_not_at_all() {
    for (format, opened, text, right) in [
        ("qwen3", false, "<think>\nplan\nit\n</think>\n\nanswer\n", ["plan\nit", "answer\n"]),
        ("qwen3", true, "plan</think>\n\nanswer", ["plan", "answer"]),
        ("qwen3", false, "answer", ["", "answer"]),
        ("qwen3", false, " <thin", ["", " <thin"]),
        ("qwen3", false, "a <think> b", ["", "a <think> b"]),
        ("deepseek_r1", false, "plan</think>answer", ["plan", "answer"]),
        ("deepseek_r1", true, "<think>plan</think>answer", ["plan", "answer"]),
        ("deepseek_r1", false, "never closed\n", ["never closed\n", ""]),
        ("qwen3", false, "<think>\n\n</think>\n\nHi", ["", "Hi"]),
    ] {
        assert_eq!(think(format, opened, &[text]), right, "{text}");
        assert_eq!(think(format, opened, &characters(text)), right, "{text}");
    }
    let mut closed = ReasoningFormat::named("deepseek_r1").unwrap().parser(false, true);
    let mut events = ReasoningEvents::default();
    closed.push("Hi", &mut events).unwrap();
    assert_eq!(events.into_vec(), [ReasoningEvent::Text("Hi".into())]);
}

/// Texts made of what parsers look at, in any order.
fn soup() -> impl Strategy<Value = String> {
    let parts = prop::sample::select(vec![
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\"]}}",
        "{\"name\": \"f\", \"parameters\": ",
        "{\"arguments\": {\"x\": 1}, \"name\": \"f\"}",
        "{\"name\":",
        "\"f\"",
        "[f(a=1, b='x')",
        "]",
        "f(",
        "x=",
        "[",
        "{",
        "}",
        ")",
        "(",
        ",",
        ":",
        "\"",
        "\\",
        "'",
        "<",
        "<tool",
        "|",
        " ",
        "\n",
        "```json\n",
        "function",
        "f",
        "null",
        "12",
        "{'a': 1}",
        "{\"a\": }",
        "\"\"\"",
        "f(a=1)",
        "é",
        "<think>",
        "</think>",
        "</th",
    ]);
    prop::collection::vec(parts, 0..16).prop_map(|parts| parts.concat())
}

fn cut(text: &str, cuts: &[prop::sample::Index]) -> Vec<usize> {
    let borders: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let mut at: Vec<usize> = cuts.iter().map(|cut| borders[cut.index(borders.len())]).collect();
    at.extend([0, text.len()]);
    at.sort_unstable();
    at
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_cutting_of_any_text_gives_the_same_calls(text in soup(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12)) {
        let at = cut(&text, &cuts);
        let pieces: Vec<&str> = at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        for format in ToolFormat::ALL {
            prop_assert_eq!(parse(format.name, &["f"], &pieces), parse(format.name, &["f"], &[&text]), "{}", format.name);
        }
    }

    #[test]
    fn any_cutting_of_any_text_gives_the_same_reasoning(text in soup(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12), opened: bool) {
        let at = cut(&text, &cuts);
        let pieces: Vec<&str> = at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        for format in ReasoningFormat::ALL {
            prop_assert_eq!(think(format.name, opened, &pieces), think(format.name, opened, &[&text]));
        }
    }

    #[test]
    fn a_text_without_marks_passes_as_it_is(text in "[a-z <>/\n.,é]{0,40}") {
        for format in ToolFormat::ALL {
            let joined: String = parse(format.name, &["f"], &characters(&text)).into_iter().map(|event| match event {
                ToolEvent::Text(text) => text,
                other => panic!("{other:?}"),
            }).collect();
            prop_assert_eq!(&joined, &text, "{}", format.name);
        }
    }

    #[test]
    fn a_call_is_never_without_a_name_and_arguments_never_without_a_call(text in soup()) {
        for format in ToolFormat::ALL {
            let mut open = false;
            for event in parse(format.name, &["f"], &[&text]) {
                match event {
                    ToolEvent::Call { name } => {
                        prop_assert!(!name.is_empty());
                        open = true;
                    }
                    ToolEvent::Arguments(json) => {
                        prop_assert!(open, "{} {:?}", format.name, text);
                        let error = serde_json::from_str::<serde::de::IgnoredAny>(&json).err();
                        prop_assert!(error.is_none_or(|error| error.is_eof()), "{} {:?}", format.name, text);
                    }
                    ToolEvent::Text(_) => {}
                }
            }
        }
    }
}
