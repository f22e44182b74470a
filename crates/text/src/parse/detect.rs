//! Which forms a model speaks, by its chat template; and whether a prompt ends within the reasoning.

/// The form of a template's tool calls; `None` if it does not show tools at all.
pub fn detect_tools(template: &str) -> Option<&'static str> {
    let marks = [
        ("<｜tool▁call▁begin｜>function", "deepseek_v3"),
        ("<｜tool▁call▁begin｜>", "deepseek_v31"),
        ("[TOOL_CALLS]", "mistral"),
        ("<tool_call>", "hermes"),
        ("<|python_start|>", "pythonic"),
        ("<|python_tag|>", "llama3_json"),
    ];
    let found = marks.iter().find(|(mark, _)| template.contains(mark)).map(|(_, name)| *name);
    found.or_else(|| template.contains("tools").then_some("json"))
}

/// The form of a template's reasoning; `None` if it knows of none.
pub fn detect_reasoning(template: &str) -> Option<&'static str> {
    if !template.contains("<think>") && !template.contains("</think>") {
        return None;
    }
    Some(if template.contains("<｜Assistant｜>") { "deepseek_r1" } else { "qwen3" })
}

/// Whether the prompt's end has opened the reasoning, and whether it has closed it.
pub fn opens_reasoning(prompt: &str) -> (bool, bool) {
    let end = prompt.trim_end();
    (end.ends_with("<think>"), end.ends_with("</think>"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_told_by_the_template() {
        for (template, tools, reasoning) in [
            ("{{ messages }}", None, None),
            ("{% if tools %}{{ tools }}{% endif %}", Some("json"), None),
            ("{{ tools }}<tool_call>…</tool_call><think>", Some("hermes"), Some("qwen3")),
            ("{{ tools }}[TOOL_CALLS]", Some("mistral"), None),
            ("{{ tools }}<|python_tag|>", Some("llama3_json"), None),
            (
                "<｜Assistant｜>…</think><｜tool▁call▁begin｜>function",
                Some("deepseek_v3"),
                Some("deepseek_r1"),
            ),
            (
                "<｜Assistant｜></think><｜tool▁call▁begin｜>' + name",
                Some("deepseek_v31"),
                Some("deepseek_r1"),
            ),
        ] {
            assert_eq!(
                (detect_tools(template), detect_reasoning(template)),
                (tools, reasoning),
                "{template}"
            );
        }
    }

    #[test]
    fn a_prompt_says_whether_reasoning_is_open_or_closed() {
        assert_eq!(opens_reasoning("<|im_start|>assistant\n<think>\n"), (true, false));
        assert_eq!(opens_reasoning("assistant\n<think>\n\n</think>\n\n"), (false, true));
        assert_eq!(opens_reasoning("assistant\n"), (false, false));
    }
}
