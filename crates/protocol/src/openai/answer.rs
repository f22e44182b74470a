//! What is written to clients. Plain shapes; who fills them decides.

use serde::Serialize;

use crate::openai::{ChatLogprobs, CompletionLogprobs};
use crate::{GrammarInfo, LeaseNote, UsageTimes};

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop string, stop id or end-of-sequence id.
    Stop,
    /// The limit or the context's end.
    Length,
    /// Aborted by its owner or a deadline.
    Abort,
    /// It called tools.
    ToolCalls,
}

/// What ended a choice, for `Stop`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Matched {
    /// A token id.
    Token(u32),
    /// A stop string.
    Text(String),
}

/// Tokens of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Usage {
    /// Of all prompts, each counted once.
    pub prompt_tokens: u64,
    /// Of all choices.
    pub completion_tokens: u64,
    /// Their sum.
    pub total_tokens: u64,
    /// What was found in the cache.
    pub prompt_tokens_details: PromptDetails,
    /// How often the answer was continued on another worker after its own had died; left out if never.
    #[serde(skip_serializing_if = "is_zero")]
    pub continuations: u32,
    /// When the answer is whole, if the worker tells.
    #[serde(flatten)]
    pub times: Option<UsageTimes>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the form that serde calls")]
fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// Details of the prompt's tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PromptDetails {
    /// Tokens whose keys and values were not computed for this request.
    pub cached_tokens: u64,
}

impl Usage {
    /// Adds up.
    pub fn new(prompt_tokens: u64, completion_tokens: u64, cached_tokens: u64) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens },
            continuations: 0,
            times: None,
        }
    }
}

/// A whole chat answer.
#[derive(Debug, Clone, Serialize)]
pub struct ChatAnswer<'a> {
    /// Made by the gateway, or the client's `rid`.
    pub id: &'a str,
    /// `chat.completion`.
    pub object: &'static str,
    /// Unix seconds.
    pub created: u64,
    /// As the client named it.
    pub model: &'a str,
    /// Changes when the same seed may give other tokens.
    pub system_fingerprint: &'a str,
    /// In order of their index.
    pub choices: Vec<ChatChoice>,
    /// Tokens.
    pub usage: Usage,
    /// If the request named or acquired a lease.
    #[serde(flatten)]
    pub lease: Option<LeaseNote>,
}

/// One choice of a chat answer.
#[derive(Debug, Clone, Serialize)]
pub struct ChatChoice {
    /// Which of the n.
    pub index: u32,
    /// What was said.
    pub message: ChatMessage,
    /// If asked for, else null.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// What matched, for a stop.
    pub matched_stop: Option<Matched>,
    /// How the constraint was met, if asked for, cut off or best effort.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grammar_info: Option<GrammarInfo>,
}

/// An assistant's message.
#[derive(Debug, Clone, Serialize)]
pub struct ChatMessage {
    /// `assistant`.
    pub role: &'static str,
    /// The text; null if there are only calls.
    pub content: Option<String>,
    /// Always null: no refusals are made here.
    pub refusal: Option<()>,
    /// What was thought before the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// In their order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
}

/// A call of a tool, or what is new of one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ToolCall {
    /// Which of the message's calls; only in deltas.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// With the call's first delta.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `function`, with the id.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    /// What is called.
    pub function: CalledFunction,
}

/// Name and arguments of a call.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct CalledFunction {
    /// Whole, with the call's first delta.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// JSON text, or what is new of it.
    pub arguments: String,
}

/// One event of a chat stream.
#[derive(Debug, Clone, Serialize)]
pub struct ChatChunk<'a, C> {
    /// As in [`ChatAnswer`].
    pub id: &'a str,
    /// `chat.completion.chunk` or `text_completion`.
    pub object: &'static str,
    /// Unix seconds.
    pub created: u64,
    /// As the client named it.
    pub model: &'a str,
    /// As in [`ChatAnswer`].
    pub system_fingerprint: &'a str,
    /// One, or none in the usage chunk.
    pub choices: &'a [C],
    /// Only if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// In the first chunk after it is known.
    #[serde(flatten)]
    pub lease: Option<LeaseNote>,
}

/// One choice of a chat chunk.
#[derive(Debug, Clone, Serialize)]
pub struct ChunkChoice {
    /// Which of the n.
    pub index: u32,
    /// What is new.
    pub delta: ChatDelta,
    /// If asked for, else null.
    pub logprobs: Option<ChatLogprobs>,
    /// Set in the last chunk of the choice.
    pub finish_reason: Option<FinishReason>,
    /// What matched, for a stop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matched_stop: Option<Matched>,
    /// How the constraint was met, if asked for, cut off or best effort.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grammar_info: Option<GrammarInfo>,
}

/// What is new in a chat choice.
#[derive(Debug, Clone, Default, Serialize)]
pub struct ChatDelta {
    /// In the first chunk of a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// New text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// New reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// News of calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
}

/// A whole completion answer.
#[derive(Debug, Clone, Serialize)]
pub struct CompletionAnswer<'a> {
    /// Made by the gateway, or the client's `rid`.
    pub id: &'a str,
    /// `text_completion`.
    pub object: &'static str,
    /// Unix seconds.
    pub created: u64,
    /// As the client named it.
    pub model: &'a str,
    /// As in [`ChatAnswer`].
    pub system_fingerprint: &'a str,
    /// In order of their index.
    pub choices: Vec<CompletionChoice>,
    /// Tokens.
    pub usage: Usage,
    /// If the request named or acquired a lease.
    #[serde(flatten)]
    pub lease: Option<LeaseNote>,
}

/// One choice of a completion, whole or in part.
#[derive(Debug, Clone, Serialize)]
pub struct CompletionChoice {
    /// Prompt index × n + sequence.
    pub index: u32,
    /// The text, or what is new of it.
    pub text: String,
    /// If asked for, else null.
    pub logprobs: Option<CompletionLogprobs>,
    /// Why it ended; null while it has not.
    pub finish_reason: Option<FinishReason>,
    /// What matched, for a stop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matched_stop: Option<Matched>,
    /// How the constraint was met, if asked for, cut off or best effort.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grammar_info: Option<GrammarInfo>,
}

/// `GET /v1/models`.
#[derive(Debug, Clone, Serialize)]
pub struct ModelList {
    /// `list`.
    pub object: &'static str,
    /// The models.
    pub data: Vec<Model>,
}

/// One model.
#[derive(Debug, Clone, Serialize)]
pub struct Model {
    /// The name that requests use.
    pub id: String,
    /// `model`.
    pub object: &'static str,
    /// Unix seconds.
    pub created: u64,
    /// Who serves it.
    pub owned_by: &'static str,
    /// Context length, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<u32>,
    /// Of an adapter, the base model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
}
