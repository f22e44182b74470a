//! What is no call, or breaks off inside: nothing of the text is lost.

use super::*;

/// Content joined, and calls with the text of their arguments.
fn told(format: &str, text: &str) -> (String, Vec<(String, String)>) {
    let (mut content, mut calls) = (String::new(), Vec::<(String, String)>::new());
    for event in parse_all_ways(format, &["f", "ping"], text) {
        match event {
            ToolEvent::Text(text) => content.push_str(&text),
            ToolEvent::Call { name } => calls.push((name, String::new())),
            ToolEvent::Arguments(json) => calls.last_mut().expect("a call first").1.push_str(&json),
        }
    }
    (content, calls)
}

/// One call of each form that writes arguments as JSON, around these.
fn around(arguments: &str) -> Vec<(&'static str, String)> {
    let object = format!(r#"{{"name": "f", "arguments": {arguments}}}"#);
    vec![
        ("hermes", format!("<tool_call>\n{object}\n</tool_call>")),
        ("json", object.clone()),
        ("json", format!("[{object}]")),
        ("llama3_json", object.clone()),
        ("mistral", format!("[TOOL_CALLS] [{object}]")),
        ("mistral", format!("[TOOL_CALLS]f[ARGS]{arguments}")),
        (
            "deepseek_v3",
            format!(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
            ),
        ),
        ("deepseek_v31", format!("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")),
    ]
}

#[test]
fn arguments_that_are_no_object_of_json_make_the_whole_call_text() {
    for arguments in [
        "{'city': 1}",
        "{city: 1}",
        "{,}",
        "{ 5}",
        "foo",
        "not json",
        "5",
        "true",
        "[1]",
        "\"foo\"",
        "\"[1]\"",
        "\"{\\\"a\\\": }\"",
        "NaN",
        "nul",
    ] {
        for (format, text) in around(arguments) {
            assert_eq!(told(format, &text), (text.clone(), vec![]), "{format} {text}");
        }
    }
}

#[test]
fn arguments_that_break_after_they_began_are_told_as_far_as_they_are_json_and_the_rest_is_text() {
    for (before, after) in [
        ("{\"a\": ", "}"),
        ("{\"a\":1,", "}"),
        ("{\"a\": ", "bar}"),
        ("{\"a\": nul", "}"),
        ("{\"a\": \"x\"", " 'y'}"),
        ("{\"a\": [1", "}"),
        ("{\"a\": 0", "1}"),
        ("{\"a\": \"\\", "x\"}"),
    ] {
        for (format, text) in around(&format!("{before}{after}")) {
            let (content, calls) = told(format, &text);
            let [(name, arguments)] = calls.as_slice() else { panic!("{format} {text} {calls:?}") };
            assert_eq!((name.as_str(), arguments.trim_end()), ("f", before.trim_end()), "{format} {text}");
            let rest = text.split_once(before).unwrap().1;
            assert_eq!(content.trim_start(), rest.trim_start(), "{format} {text}");
        }
    }
}

#[test]
fn raw_control_characters_in_arguments_are_spelt_as_json() {
    for (format, text) in around("{\"a\": \"x\ny\u{1}\"}") {
        let (content, calls) = told(format, &text);
        assert_eq!((content.as_str(), calls[0].1.as_str()), ("", "{\"a\": \"x\\ny\\u0001\"}"), "{format}");
    }
}

#[test]
fn a_call_that_breaks_off_inside_loses_nothing_of_what_follows() {
    let begun = r#"<tool_call>{"name": "f", "arguments": {"a": "#;
    let (content, calls) =
        told("hermes", &format!("{begun}</tool_call> and <tool_call>{{\"name\": \"g\"}}</tool_call>"));
    assert_eq!(content, "</tool_call> and");
    assert_eq!(calls, [("f".into(), "{\"a\": ".into()), ("g".into(), "{}".into())]);
    for (format, text, content) in [
        ("json", r#"{"name": "f", "arguments": {} , "id": x}"#, r#" , "id": x}"#),
        ("mistral", r#"[TOOL_CALLS] [{"name": "f", "arguments": {}}] so"#, " so"),
        ("mistral", r#"[TOOL_CALLS] [{"name": "f", "arguments": {}}, so"#, ", so"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{} so", " so"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{} so <｜tool▁call▁end｜>!", " so !"),
    ] {
        assert_eq!(told(format, text), (content.into(), vec![("f".into(), "{}".into())]), "{text}");
    }
    for text in ["[TOOL_CALLS]f is {\"a\": 1}", "[TOOL_CALLS][]", "[TOOL_CALLS]", "[TOOL_CALLS][, 1]"] {
        assert_eq!(told("mistral", text), (text.into(), vec![]));
    }
    for inner in
        ["function<｜tool▁sep｜>f\n```json\nsee {}", "function<｜tool▁sep｜>f or g {}", "x<｜tool▁sep｜>f {}"]
    {
        let text = format!("<｜tool▁call▁begin｜>{inner}<｜tool▁call▁end｜>");
        assert_eq!(told("deepseek_v3", &text), (text.clone(), vec![]));
    }
}

#[test]
fn the_white_space_and_the_half_mark_at_a_calls_end_are_no_text() {
    let object = r#"<tool_call>{"name": "f", "arguments": {"a": 1}}"#;
    for (after, content) in [
        ("\n</tool_call> done", " done"),
        ("\n</tool_call>\n", ""),
        ("\n</tool", ""),
        ("</tool_call", ""),
        ("\n", ""),
        ("\n<", ""),
        ("\nso", "\nso"),
        ("}\n</tool_call>", "}"),
        ("\n</tool_calm>", "\n</tool_calm>"),
    ] {
        let calls = vec![("f".into(), "{\"a\": 1}".into())];
        assert_eq!(told("hermes", &format!("{object}{after}")), (content.into(), calls), "{after:?}");
    }
    let open = r#"<tool_call>{"name": "f", "arguments": {}</tool_call>"#;
    assert_eq!(told("hermes", open), (String::new(), vec![("f".into(), "{}".into())]));
}

#[test]
fn a_list_in_python_is_calls_up_to_the_first_that_is_none() {
    for text in [
        "[f(\"x\")]",
        "[f(**x)]",
        "[f(*x)]",
        "[f(5)]",
        "[f(a=1, 5)]",
        "[f(city=\"a\"",
        "[f(city=\"a\" n=1)]",
        "[f(a=b)]",
        "[f(a=now())]",
        "[f(a=1",
        "[f(",
        "[f(a=)]",
        "[f(a=\"x)]",
    ] {
        assert_eq!(told("pythonic", text), (text.into(), vec![]));
    }
    let ping = || ("ping".to_owned(), "{}".to_owned());
    for (text, content) in [
        ("[ping(), nope()]", ", nope()]"),
        ("[ping() , f(5)] so", " , f(5)] so"),
        ("[ping()] so", " so"),
        ("[ping()", ""),
        ("[ping(), ", ""),
        ("[ping(), f(a=1", ", f(a=1"),
        ("[ping() so", " so"),
        ("[ping(),]", ""),
    ] {
        assert_eq!(told("pythonic", text), (content.into(), vec![ping()]), "{text}");
    }
    let text = "[f(a=0x10, b=-.5, c=\"\\101\", d=\"\"\"it's \"so\") \"\"\", e='')]";
    let json = "{\"a\": 16, \"b\": -0.5, \"c\": \"A\", \"d\": \"it's \\\"so\\\") \", \"e\": \"\"}";
    assert_eq!(told("pythonic", text), (String::new(), vec![("f".into(), json.into())]));
}

#[test]
fn bare_json_is_calls_up_to_the_first_that_is_none() {
    let call = r#"{"name": "f", "parameters": {"a": 1}}"#;
    for (text, content) in [
        (format!("{call} x"), " x"),
        (
            format!("[{call}, {{\"name\": \"nope\", \"parameters\": {{}}}}]"),
            ", {\"name\": \"nope\", \"parameters\": {}}]",
        ),
        (format!("[{call}] x"), " x"),
        (r#"{"name": "f", "parameters": {"a": 1}, "y": 1}"#.to_owned(), ""),
    ] {
        for format in ["json", "llama3_json"] {
            assert_eq!(
                told(format, &text),
                (content.into(), vec![("f".into(), "{\"a\": 1}".into())]),
                "{text}"
            );
        }
    }
    let before = r#"{"y": 1, "name": "f", "parameters": {"a": 1}}"#;
    assert_eq!(told("json", before), (before.into(), vec![]));
}
