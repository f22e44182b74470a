//! Prompts to token ids: template rendering and tokenising, off the I/O threads when large.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::Arc;

use branchline_core::{Error, ErrorCode, Result};
use branchline_protocol::openai::ChatTemplateInput;
use branchline_protocol::{Limits, Prompt};
use branchline_text::ChatTemplate;
use branchline_worker::Model;

use super::Offload;

/// What of a model bounds a request.
pub fn limits(model: &Model) -> Limits {
    let info = &model.info;
    // 0 is what a worker says that does not tell.
    let pool_tokens =
        if info.max_request_tokens == 0 { info.context_length } else { info.max_request_tokens };
    Limits { vocab_size: info.vocab_size, context_length: info.context_length, pool_tokens }
}

/// The ids of a prompt; plain text gets the special tokens that the model's tokenizer adds.
///
/// # Errors
/// `InvalidArgument` naming `field` if the text has no tokens, or is so long that it can't fit the context: then
/// it is not tokenised at all.
pub async fn encode(
    offload: &Offload,
    model: &Arc<Model>,
    prompt: Prompt,
    add_special: bool,
    field: &str,
) -> Result<Vec<u32>> {
    let tokens = match prompt {
        Prompt::Tokens(tokens) => tokens,
        Prompt::Text(text) => {
            let tokenizer = Arc::clone(&model.tokenizer);
            refuse_hopeless(&text, tokenizer.at_least(&text), limits(model), field)?;
            offload.run(text.len(), move || tokenizer.encode(&text, add_special)).await?
        }
    };
    if tokens.is_empty() {
        return Err(Error::invalid(field, format!("`{field}` has no tokens; send at least one")));
    }
    Ok(tokens)
}

/// Refuses a text of too many tokens, however they are cut.
fn refuse_hopeless(text: &str, at_least: usize, limits: Limits, field: &str) -> Result<()> {
    let (limit, owner) = match limits.pool_tokens < limits.context_length {
        true => (limits.pool_tokens as usize, "what the worker's KV pool holds"),
        false => (limits.context_length as usize, "the context length"),
    };
    if at_least <= limit {
        return Ok(());
    }
    let message = format!(
        "the prompt has {} bytes, at least {at_least} tokens, and {owner} is {limit}, prompt and \
         output together; shorten the prompt",
        text.len()
    );
    Err(Error::invalid(field, message))
}

/// The text of a chat.
///
/// # Errors
/// `Unimplemented` if the model has no template, `InvalidArgument` for what the template refuses.
pub async fn render(
    offload: &Offload,
    model: &Arc<Model>,
    input: ChatTemplateInput,
    bytes: usize,
) -> Result<String> {
    let Some(template) = model.chat_template.clone() else {
        let message =
            format!("model {:?} has no chat template; use /v1/completions or /generate", model.name);
        return Err(Error::new(ErrorCode::Unimplemented, message).with_field("messages"));
    };
    offload
        .run(bytes, move || {
            if input.continue_final_message { open(&template, &input) } else { fill(&template, &input) }
        })
        .await
}

fn fill(template: &ChatTemplate, input: &ChatTemplateInput) -> Result<String> {
    let text =
        template.render(&input.messages, input.tools.as_ref(), input.add_generation_prompt, &input.kwargs);
    text.map_err(|error| match error.field {
        None => error.with_field("messages"),
        Some(_) => error,
    })
}

/// White space that a template which trims messages takes away, and none writes itself.
const EM_SPACE: char = '\u{2003}';

/// The text of a chat up to and with the last message's own text, so that the model goes on with it.
///
/// Where that is, a second rendering says, in which a mark that no client can guess follows the message's text.
fn open(template: &ChatTemplate, input: &ChatTemplateInput) -> Result<String> {
    let refuse = |why: &str| {
        Error::invalid(
            "continue_final_message",
            format!("the last message can't be continued: {why}; leave `continue_final_message` out"),
        )
    };
    let last = input.final_text().filter(|text| !text.trim().is_empty());
    let last = last.ok_or_else(|| refuse("it has no text"))?;
    let mark = format!("mark{:016x}", RandomState::new().build_hasher().finish());
    let mut marked = input.clone();
    if let Some(content) = marked.messages.as_array_mut().and_then(|all| all.last_mut()?.get_mut("content")) {
        *content = format!("{last}{mark}{EM_SPACE}").into();
    }
    let mut head = fill(template, &marked)?;
    let at = head.rfind(&mark).ok_or_else(|| refuse("the template does not keep its text"))?;
    let trims = !head[at + mark.len()..].starts_with(EM_SPACE);
    head.truncate(at);
    // A template may also trim other white space only; then the plain text does not begin like this.
    if trims || !fill(template, input)?.starts_with(&head) {
        head.truncate(head.trim_end().len());
    }
    Ok(head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use branchline_text::SpecialTokens;
    use serde_json::json;

    const CHATML: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}\
                          <|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

    fn prompt(source: &str, text: &str) -> Result<String> {
        let input = ChatTemplateInput {
            messages: json!([{"role": "user", "content": text}, {"role": "assistant", "content": text}]),
            tools: None,
            add_generation_prompt: false,
            continue_final_message: true,
            kwargs: serde_json::Map::new(),
        };
        open(&ChatTemplate::new(source, SpecialTokens::default()).unwrap(), &input)
    }

    #[test]
    fn a_continued_message_ends_the_prompt_whatever_its_text() {
        for text in
            ["im", "end", "|", ">", "e", "<", "<|im_end|>", "Hello ", "Hello\n", " Hi", "Hi", "a\u{2003}"]
        {
            let by_hand = format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n{text}");
            assert_eq!(prompt(CHATML, text).unwrap(), by_hand, "{text:?}");
        }
    }

    #[test]
    fn a_continued_message_is_trimmed_where_the_template_trims_it() {
        // The space before the end mark is the template's own.
        let all = "{% for message in messages %}[{{ message.content.strip() }} </s>]{% endfor %}";
        let lines = "{% for message in messages %}[{{ message.content.rstrip('\\n') }}</s>]{% endfor %}";
        for source in [all, lines] {
            assert_eq!(prompt(source, "Hello\n").unwrap(), prompt(source, "Hello").unwrap(), "{source}");
        }
        assert_eq!(prompt(all, "s> ").unwrap(), "[s> </s>][s>");
        assert_eq!(prompt(lines, "s> ").unwrap(), "[s> </s>][s> ");
    }

    #[test]
    fn a_message_without_text_or_that_the_template_drops_is_not_continued() {
        for (source, text) in [(CHATML, " \n"), (CHATML, ""), ("{{ messages[0].content }}", "Hi")] {
            let error = prompt(source, text).unwrap_err();
            assert_eq!(error.field.as_deref(), Some("continue_final_message"), "{source} {text:?}");
        }
    }

    #[test]
    fn a_text_of_too_many_tokens_is_refused_by_its_length_alone() {
        let limits = Limits { vocab_size: 300, context_length: 10, pool_tokens: 10 };
        assert_eq!(refuse_hopeless("x", 10, limits, "prompt"), Ok(()));
        let error = refuse_hopeless(&"x".repeat(99), 11, limits, "prompt").unwrap_err();
        assert_eq!((error.code, error.field.as_deref()), (ErrorCode::InvalidArgument, Some("prompt")));
        for part in ["99 bytes", "at least 11 tokens", "context length is 10"] {
            assert!(error.message.contains(part), "{}", error.message);
        }
    }

    #[test]
    fn a_text_that_the_pool_can_not_hold_is_refused_with_its_size() {
        let limits = Limits { vocab_size: 300, context_length: 10, pool_tokens: 6 };
        assert_eq!(refuse_hopeless("x", 6, limits, "text"), Ok(()));
        let error = refuse_hopeless("xxxxxxx", 7, limits, "text").unwrap_err();
        assert_eq!(error.field.as_deref(), Some("text"));
        assert!(error.message.contains("KV pool holds is 6"), "{}", error.message);
    }
}
