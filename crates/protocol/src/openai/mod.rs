//! OpenAI chat and completion shapes: requests, answers, stream chunks.

mod answer;
mod chat;
mod completion;
mod logprobs;
mod messages;
mod stream;

pub use answer::{
    ChatAnswer, ChatChoice, ChatChunk, ChatDelta, ChatMessage, ChunkChoice, CompletionAnswer,
    CompletionChoice, FinishReason, Matched, Model, ModelList, PromptDetails, Usage,
};
pub use chat::ChatRequest;
pub use completion::CompletionRequest;
pub use logprobs::{ChatLogprobs, CompletionLogprobs, Offsets, TokenLogprob};
pub use messages::{ChatTemplateInput, read_template_input};
pub use stream::StreamOptions;
