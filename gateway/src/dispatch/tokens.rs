//! Prompts to token ids: template rendering and tokenising, off the I/O threads when large.

use std::sync::Arc;

use branchline_core::{Error, ErrorCode, Result};
use branchline_protocol::openai::ChatTemplateInput;
use branchline_protocol::{Limits, Prompt};
use branchline_worker::Model;

use super::Offload;

/// What of a model bounds a request.
pub fn limits(model: &Model) -> Limits {
    Limits { vocab_size: model.info.vocab_size, context_length: model.info.context_length }
}

/// The ids of a prompt; plain text gets the special tokens that the model's tokenizer adds.
///
/// # Errors
/// `InvalidArgument` naming `field` if the text has no tokens.
pub async fn encode(
    offload: &Offload,
    model: &Arc<Model>,
    prompt: Prompt,
    add_special: bool,
    field: &'static str,
) -> Result<Vec<u32>> {
    let tokens = match prompt {
        Prompt::Tokens(tokens) => tokens,
        Prompt::Text(text) => {
            let tokenizer = Arc::clone(&model.tokenizer);
            offload.run(text.len(), move || tokenizer.encode(&text, add_special)).await?
        }
    };
    if tokens.is_empty() {
        return Err(Error::invalid(field, format!("`{field}` has no tokens; send at least one")));
    }
    Ok(tokens)
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
            let text = template
                .render(&input.messages, input.tools.as_ref(), input.add_generation_prompt, &input.kwargs)
                .map_err(|error| match error.field {
                    None => error.with_field("messages"),
                    Some(_) => error,
                })?;
            if input.continue_final_message { cut(text, &input) } else { Ok(text) }
        })
        .await
}

/// Ends the rendered text with the last message's own text, so that the model goes on with it.
fn cut(mut text: String, input: &ChatTemplateInput) -> Result<String> {
    let last = input.final_text().unwrap_or_default().trim_end();
    let refuse = |why: &str| {
        Error::invalid(
            "continue_final_message",
            format!("the last message can't be continued: {why}; leave `continue_final_message` out"),
        )
    };
    if last.is_empty() {
        return Err(refuse("it has no text"));
    }
    let start = text.rfind(last).ok_or_else(|| refuse("the template does not keep its text"))?;
    text.truncate(start + last.len());
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn input(text: &str) -> ChatTemplateInput {
        ChatTemplateInput {
            messages: json!([{"role": "assistant", "content": text}]),
            tools: None,
            add_generation_prompt: false,
            continue_final_message: true,
            kwargs: serde_json::Map::new(),
        }
    }

    #[test]
    fn a_continued_message_ends_the_prompt() {
        let rendered = "<s>user: Sure?</s><s>assistant: Sure</s>\n".to_owned();
        assert_eq!(cut(rendered, &input("Sure ")).unwrap(), "<s>user: Sure?</s><s>assistant: Sure");
        assert!(cut("x".into(), &input(" ")).is_err());
        assert!(cut("x".into(), &input("y")).is_err());
    }
}
