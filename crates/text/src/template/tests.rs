//! Templates in the manner of real models, and hostile ones.

use std::time::{Duration, UNIX_EPOCH};

use serde_json::{Map, json};

use super::*;

fn template(source: &str) -> ChatTemplate {
    let special = SpecialTokens { bos: Some("<s>".into()), eos: Some("</s>".into()), pad: None };
    ChatTemplate::with_clock(source, special, || UNIX_EPOCH + Duration::from_secs(86_400)).unwrap()
}

fn render(source: &str, messages: Json) -> Result<String> {
    template(source).render(&messages, None, false, &Map::new())
}

fn rendered(source: &str) -> String {
    render(source, json!([])).unwrap()
}

#[test]
fn chatml_renders_with_and_without_generation_prompt() {
    let chatml = template(
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
         {{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + \
         message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}\
         {{ '<|im_start|>assistant\n' }}{% endif %}",
    );
    let messages = json!([{"role": "user", "content": "Hi <b> & é"}]);
    let text = chatml.render(&messages, None, false, &Map::new()).unwrap();
    assert_eq!(text, "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi <b> & é<|im_end|>\n");
    let longer = chatml.render(&messages, None, true, &Map::new()).unwrap();
    assert_eq!(longer, text + "<|im_start|>assistant\n");
}

#[test]
fn blocks_on_their_own_lines_leave_no_space_behind() {
    let source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.role }}|\n    {% endfor %}\nend\n";
    assert_eq!(render(source, json!([{"role": "a"}, {"role": "b"}])).unwrap(), "<s>\na|\nb|\nend");
}

#[test]
fn python_methods_namespaces_loop_controls_and_macros_work() {
    let source = "{%- macro show(x) -%}[{{ x }}]{%- endmacro -%}{%- set ns = namespace(n=0, last='') -%}\
        {%- for m in messages[::-1] -%}{%- if m.content is not string -%}{%- continue -%}{%- endif -%}\
        {%- set ns.n = ns.n + 1 -%}{%- set ns.last = m.content.strip().split('|')[-1].title() -%}\
        {%- if ns.n == 2 -%}{%- break -%}{%- endif -%}{%- endfor -%}{{ show(ns.last) }}{{ ns.n }}\
        {{ messages[0].get('missing', 'none') }}{{ 'x'.startswith('x') }}{{ none }}";
    let messages = json!([{"content": "no"}, {"content": " a|b c "}, {"content": [1]}, {"content": "d"}]);
    assert_eq!(render(source, messages).unwrap(), "[B C]2noneTrueNone");
}

#[test]
fn generation_blocks_are_transparent() {
    assert_eq!(rendered("a{% generation %}b{% endgeneration %}c"), "abc");
}

#[test]
fn undefined_is_empty_and_false_but_its_attributes_are_errors() {
    assert_eq!(rendered("[{{ nothing }}]{% if nothing %}x{% endif %}{{ nothing is defined }}"), "[]False");
    let error = render("{{ nothing.more }}", json!([])).unwrap_err();
    assert_eq!(error.field.as_deref(), Some("messages"));
}

#[test]
fn tools_are_none_or_json_in_pythons_spelling() {
    let source = "{% if tools is not none %}{{ tools | tojson }}|{{ tools[0] | tojson(indent=2) }}{% else %}-{% endif %}";
    assert_eq!(rendered(source), "-");
    let tools = json!([{"name": "été", "description": "a<b> & 'c'", "n": [1.0, true, null]}]);
    let text = template(source).render(&json!([]), Some(&tools), false, &Map::new()).unwrap();
    let (compact, pretty) = text.split_once('|').unwrap();
    assert_eq!(compact, r#"[{"name": "été", "description": "a<b> & 'c'", "n": [1.0, true, null]}]"#);
    assert!(pretty.starts_with("{\n  \"name\": \"été\",\n"), "{pretty}");
    assert_eq!(serde_json::from_str::<Json>(pretty).unwrap(), tools[0]);
    let options =
        "{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=true, sort_keys=true, separators=[',', ':']) }}";
    assert_eq!(rendered(options), r#"{"a":"\u00e9","b":1}"#);
}

#[test]
fn extra_variables_are_visible_but_cannot_replace_the_messages() {
    let extra = json!({"enable_thinking": false, "messages": [], "eos_token": "!"});
    let source = "{{ enable_thinking }}{{ messages | length }}{{ eos_token }}{{ strftime_now('%d %b %Y') }}";
    let text = template(source).render(&json!([1]), None, false, extra.as_object().unwrap()).unwrap();
    assert_eq!(text, "False1!02 Jan 1970");
}

#[test]
fn a_raised_message_reaches_the_client() {
    let error = render("{{ raise_exception('Roles must alternate') }}", json!([])).unwrap_err();
    assert_eq!(error.message, "the chat template refuses the messages: Roles must alternate");
    assert_eq!(error.code, branchline_core::ErrorCode::InvalidArgument);
    let nested =
        render("{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{{ m() }}", json!([])).unwrap_err();
    assert!(nested.message.ends_with(": deep"), "{}", nested.message);
}

#[test]
fn a_broken_template_is_refused_with_its_line() {
    let error = ChatTemplate::new("ok\n{% if %}", SpecialTokens::default()).unwrap_err();
    assert_eq!(error.field.as_deref(), Some("chat_template"));
    assert!(error.message.contains(":2"), "{}", error.message);
}

#[test]
fn hostile_templates_end_in_an_error() {
    let bombs = [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for a in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10000000000 }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        "{{ '%1000000000d' | format(1) }}",
    ];
    for bomb in bombs {
        let error = render(bomb, json!([])).unwrap_err();
        assert_eq!(error.code, branchline_core::ErrorCode::InvalidArgument, "{bomb}");
    }
}

#[test]
fn a_template_that_nests_values_cannot_break_the_stack() {
    let deep = format!("{}ns.v{}", "[".repeat(40), "]".repeat(40));
    for use_of_it in ["done", "{{ ns.v }}", "{{ ns.v | tojson }}", "{{ ns.v == [ns.v] }}"] {
        for nested in ["[ns.v]", "{'a': ns.v}", deep.as_str()] {
            let set = format!("{{% set ns.v = {nested} %}}");
            for rounds in [500, 2_000, 99_999] {
                let source = format!(
                    "{{% set ns = namespace(v=[]) %}}{{% for a in range({rounds}) %}}{set}{{% endfor %}}{use_of_it}"
                );
                if let Err(error) = render(&source, json!([])) {
                    assert_eq!(error.code, branchline_core::ErrorCode::InvalidArgument, "{source}");
                }
            }
        }
    }
}

#[test]
fn long_conversations_are_within_the_budget() {
    let messages: Vec<Json> =
        (0..2000).map(|i| json!({"role": "user", "content": "word ".repeat(100) + &i.to_string()})).collect();
    let source = "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<u>' + m['content'] | trim + '</u>' }}{% endif %}{% endfor %}";
    assert!(render(source, messages.into()).unwrap().ends_with("1999</u>"));
}
