//! Every form of tool calls, as the models write it: rendered from random calls, cut at random, read back the same.

use branchline_text::parse::{ToolEvent, ToolEvents, ToolFormat};
use proptest::prelude::*;
use serde_json::{Value, json};

/// One call: a tool's name and its arguments.
type Call = (String, Value);

const TOOLS: [&str; 4] = ["get_weather", "search", "f", "get_weather_at"];

/// Which forms stand where prose may come before them.
const MARKED: [&str; 5] = ["hermes", "qwen", "mistral", "deepseek_v3", "deepseek_v31"];

/// How a model of this form writes calls; `gap` is the white space that it likes.
fn render(form: &str, calls: &[Call], gap: &str) -> String {
    let object = |(name, arguments): &Call, key: &str| {
        format!("{{\"name\":{gap}{},{gap}\"{key}\":{gap}{arguments}}}", json!(name))
    };
    let each = |write: &dyn Fn(&Call) -> String, between: &str| {
        calls.iter().map(write).collect::<Vec<_>>().join(between)
    };
    match form {
        "hermes" | "qwen" => {
            each(&|call| format!("<tool_call>{gap}{}{gap}</tool_call>", object(call, "arguments")), gap)
        }
        "json" => format!("[{}]", each(&|call| object(call, "arguments"), ", ")),
        "llama3_json" => each(&|call| object(call, "parameters"), "; "),
        "mistral" => format!("[TOOL_CALLS]{gap}[{}]", each(&|call| object(call, "arguments"), ", ")),
        "mistral_args" => each(&|(name, arguments)| format!("[TOOL_CALLS]{name}[ARGS]{arguments}"), ""),
        "pythonic" => format!("[{}]", each(&python_call, ", ")),
        "deepseek_v3" | "deepseek_r1" => {
            let one = |(name, arguments): &Call| {
                format!(
                    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
                )
            };
            format!("<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>", each(&one, "\n"))
        }
        "deepseek_v31" => {
            let one = |(name, arguments): &Call| {
                format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")
            };
            format!("<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>", each(&one, ""))
        }
        other => panic!("no form {other}"),
    }
}

fn python_call((name, arguments): &Call) -> String {
    let pairs: Vec<String> = arguments
        .as_object()
        .expect("an object")
        .iter()
        .map(|(key, value)| format!("{key}={}", python(value)))
        .collect();
    format!("{name}({})", pairs.join(", "))
}

fn python(value: &Value) -> String {
    match value {
        Value::Null => "None".into(),
        Value::Bool(yes) => if *yes { "True" } else { "False" }.into(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => {
            format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'").replace('\n', "\\n"))
        }
        Value::Array(items) => format!("[{}]", items.iter().map(python).collect::<Vec<_>>().join(", ")),
        Value::Object(map) => {
            let pairs: Vec<_> =
                map.iter().map(|(key, value)| format!("'{key}': {}", python(value))).collect();
            format!("{{{}}}", pairs.join(", "))
        }
    }
}

/// The parser that reads a rendered form.
fn parser_of(form: &str) -> &str {
    if form == "mistral_args" { "mistral" } else { form }
}

/// Events of the text in these pieces, neighbours joined.
fn parse(form: &str, pieces: &[&str]) -> Vec<ToolEvent> {
    let tools: Vec<String> = TOOLS.map(str::to_owned).into();
    let mut parser = ToolFormat::named(parser_of(form)).expect("it is built in").parser(&tools);
    let mut out = ToolEvents::default();
    for piece in pieces {
        parser.push(piece, &mut out).expect("built-in parsers never fail");
    }
    parser.finish(&mut out).expect("built-in parsers never fail");
    out.into_vec()
}

fn text_of(events: &[ToolEvent]) -> String {
    events
        .iter()
        .filter_map(|event| match event {
            ToolEvent::Text(text) => Some(text.as_str()),
            _ => None,
        })
        .collect()
}

/// Calls with the texts of their arguments.
fn calls_of(events: &[ToolEvent]) -> Vec<(String, String)> {
    let mut calls: Vec<(String, String)> = Vec::new();
    for event in events {
        match event {
            ToolEvent::Text(_) => {}
            ToolEvent::Call { name } => calls.push((name.clone(), String::new())),
            ToolEvent::Arguments(json) => calls.last_mut().expect("a call comes first").1.push_str(json),
        }
    }
    calls
}

fn read(events: &[ToolEvent]) -> Vec<Call> {
    let parsed = |(name, text): (String, String)| {
        let value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text:?}"));
        (name, value)
    };
    calls_of(events).into_iter().map(parsed).collect()
}

const FORMS: [&str; 10] = [
    "hermes",
    "qwen",
    "json",
    "llama3_json",
    "mistral",
    "mistral_args",
    "pythonic",
    "deepseek_v3",
    "deepseek_r1",
    "deepseek_v31",
];

#[test]
fn every_built_in_form_is_proved_here() {
    for format in ToolFormat::ALL {
        assert!(FORMS.contains(&format.name), "{} has no rendering", format.name);
    }
}

#[test]
fn calls_as_models_write_them_are_read() {
    let oslo = json!({"city": "Oslo"});
    for (form, text, wanted) in [
        (
            "hermes",
            "<tool_call>{\"arguments\": {\"city\": \"Oslo\"}, \"name\": \"get_weather\"}</tool_call>",
            &oslo,
        ),
        (
            "hermes",
            "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": \"{\\\"city\\\": \\\"Oslo\\\"}\"}\n</tool_call>",
            &oslo,
        ),
        (
            "qwen",
            "\n<tool_call>\r\n{ \"name\" : \"get_weather\" , \"arguments\" : {\"city\": \"Oslo\"} }\r\n</tool_call>\n",
            &oslo,
        ),
        (
            "llama3_json",
            "<|python_tag|>{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Oslo\"}}",
            &oslo,
        ),
        (
            "llama3_json",
            "{\"type\": \"function\", \"name\": \"get_weather\", \"parameters\": {\"city\": \"Oslo\"}}",
            &oslo,
        ),
        (
            "mistral",
            "[TOOL_CALLS] [{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}, \"id\": \"abcdefghi\"}]",
            &oslo,
        ),
        ("mistral", "[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{\"city\": \"Oslo\"}", &oslo),
        ("mistral", "[TOOL_CALLS]get_weather{\"city\": \"Oslo\"}", &oslo),
        ("pythonic", "<|python_start|>[get_weather(city=\"Oslo\")]<|python_end|>", &oslo),
        ("pythonic", "[ get_weather( city = 'Oslo' ), ]", &oslo),
        ("json", "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}", &oslo),
        ("json", "\n [ {\"name\": \"get_weather\", \"parameters\": {\"city\": \"Oslo\"}} ] \n", &oslo),
    ] {
        let events = parse(form, &[text]);
        assert_eq!(read(&events), [("get_weather".to_owned(), wanted.clone())], "{form} {text}");
        assert_eq!(text_of(&events).trim(), "", "{form} {text}");
    }
}

#[test]
fn prose_before_and_after_calls_is_kept_and_marks_are_not() {
    for form in MARKED {
        let call = render(form, &[("f".to_owned(), json!({"a": 1}))], " ");
        let events = parse(form, &[&format!("I look it up. {call} Done.")]);
        assert_eq!(read(&events), [("f".to_owned(), json!({"a": 1}))], "{form}");
        let text = text_of(&events);
        assert!(text.starts_with("I look it up.") && text.trim_end().ends_with("Done."), "{form} {text:?}");
        assert!(!text.contains(['｜', '<', '[', ']', '{']), "{form} {text:?}");
    }
}

#[test]
fn a_tool_without_arguments_gets_an_empty_object_in_every_form() {
    for form in FORMS {
        let events = parse(form, &[&render(form, &[("f".to_owned(), json!({}))], "")]);
        assert_eq!(calls_of(&events), [("f".to_owned(), "{}".to_owned())], "{form}");
    }
}

#[test]
fn a_name_that_begins_another_name_is_the_whole_name() {
    for form in FORMS {
        for name in ["get_weather", "get_weather_at"] {
            let events = parse(form, &[&render(form, &[(name.to_owned(), json!({"x": [1]}))], " ")]);
            assert_eq!(read(&events), [(name.to_owned(), json!({"x": [1]}))], "{form}");
        }
    }
}

#[test]
fn deep_arguments_and_long_texts_take_time_in_proportion() {
    let deep = format!("{}1{}", "[".repeat(60), "]".repeat(60));
    let arguments =
        json!({"deep": serde_json::from_str::<Value>(&deep).expect("json"), "long": "x".repeat(200_000)});
    for form in FORMS {
        let events = parse(form, &[&render(form, &[("f".to_owned(), arguments.clone())], " ")]);
        assert_eq!(read(&events), [("f".to_owned(), arguments.clone())], "{form}");
    }
}

fn scalar() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1_000_000i32..1_000_000).prop_map(|number| Value::from(f64::from(number) / 64.0)),
        // What would end a value, a string, a call or a mark if it were read carelessly.
        prop::sample::select(vec![
            "",
            "Oslo",
            "it's",
            "\"",
            "\\",
            "a\nb",
            "}",
            "]})",
            "), f(",
            "東京",
            "</tool_call>",
            "[ARGS]",
            "=",
            ";",
            "```",
        ])
        .prop_map(Value::from),
    ]
}

fn value() -> impl Strategy<Value = Value> {
    scalar().prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-z]{1,6}", inner, 0..4).prop_map(|map| map.into_iter().collect()),
        ]
    })
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let arguments = prop::collection::btree_map("[a-z_]{1,8}", value(), 0..4)
        .prop_map(|map| map.into_iter().collect::<Value>());
    let call = (prop::sample::select(TOOLS.to_vec()), arguments);
    prop::collection::vec(call.prop_map(|(name, arguments)| (name.to_owned(), arguments)), 1..4)
}

/// Cuts at any borders of characters.
fn pieces<'a>(text: &'a str, cuts: &[prop::sample::Index]) -> Vec<&'a str> {
    let borders: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let mut at: Vec<usize> = cuts.iter().map(|cut| borders[cut.index(borders.len())]).collect();
    at.extend([0, text.len()]);
    at.sort_unstable();
    at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

fn cuts() -> impl Strategy<Value = Vec<prop::sample::Index>> {
    prop::collection::vec(any::<prop::sample::Index>(), 0..20)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn rendered_calls_are_read_back_however_they_are_cut(calls in calls(), gap in "[ \n]{0,2}", cuts in cuts()) {
        for form in FORMS {
            let text = render(form, &calls, &gap);
            let events = parse(form, &pieces(&text, &cuts));
            prop_assert_eq!(read(&events), calls.clone(), "{} {}", form, text);
            let prose = text_of(&events);
            prop_assert_eq!(prose.trim(), "", "{} {}", form, text);
        }
    }

    #[test]
    fn a_cut_answer_tells_whole_names_and_beginnings_of_arguments(calls in calls(), stop: prop::sample::Index) {
        for form in FORMS {
            let text = render(form, &calls, " ");
            let all = calls_of(&parse(form, &[&text]));
            let borders: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
            let told = calls_of(&parse(form, &[&text[..borders[stop.index(borders.len())]]]));
            prop_assert!(told.len() <= all.len());
            for (at, ((name, arguments), (whole_name, whole))) in told.iter().zip(&all).enumerate() {
                prop_assert_eq!(name, whole_name);
                prop_assert!(whole.starts_with(arguments.as_str()), "{} {:?} {:?}", form, arguments, whole);
                prop_assert!(at + 1 == told.len() || arguments == whole, "{} only the last call may be cut", form);
            }
        }
    }

    #[test]
    fn what_has_been_told_is_never_taken_back(calls in calls(), cuts in cuts()) {
        for form in FORMS {
            let text = render(form, &calls, " ");
            let tools: Vec<String> = TOOLS.map(str::to_owned).into();
            let mut parser = ToolFormat::named(parser_of(form)).expect("it is built in").parser(&tools);
            let mut seen = ToolEvents::default();
            let mut text_before_calls = String::new();
            for piece in pieces(&text, &cuts) {
                parser.push(piece, &mut seen).expect("built-in parsers never fail");
            }
            for event in seen.into_vec() {
                match event {
                    ToolEvent::Text(text) => text_before_calls.push_str(&text),
                    ToolEvent::Call { .. } => prop_assert_eq!(text_before_calls.trim(), "", "{}", form),
                    ToolEvent::Arguments(_) => {}
                }
            }
        }
    }
}
