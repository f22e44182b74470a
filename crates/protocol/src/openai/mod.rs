//! OpenAI chat and completion shapes: requests, answers, stream chunks.

mod answer;
mod arguments;
mod chat;
mod completion;
mod logprobs;
mod messages;
mod stream;
mod tools;

pub use answer::{
    CalledFunction, ChatAnswer, ChatChoice, ChatChunk, ChatDelta, ChatMessage, ChunkChoice, CompletionAnswer,
    CompletionChoice, FinishReason, Matched, Model, ModelList, PromptDetails, ToolCall, Usage,
};
pub use chat::ChatRequest;
pub use completion::CompletionRequest;
pub use logprobs::{ChatLogprobs, CompletionLogprobs, Offsets, TokenLogprob};
pub(crate) use messages::template_kwargs;
pub(crate) use messages::text;
pub use messages::{ChatTemplateInput, read_template_input};
pub use stream::StreamOptions;
pub use tools::{ToolChoice, Tools};
