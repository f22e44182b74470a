//! OpenAI, Anthropic and SGLang-native wire types, error bodies and SSE framing. serde only.
//!
//! Requests are read field by field from a parsed [`Document`], so that every refusal names the field by
//! its path, the value and what to do. Knows nothing of models, workers or HTTP; limits are passed in.

pub mod anthropic;
mod choices;
mod constraint;
mod document;
mod error;
mod fields;
mod input;
mod lease;
mod logprobs;
pub mod native;
pub mod openai;
mod prompt;
mod refused;
pub mod responses;
mod sampling;
pub mod sse;
mod timings;
mod tokenize;
mod vectors;

pub use choices::{ChoiceInput, MAX_CHOICES, read_choices};
pub use constraint::{Constraint, Form, GrammarInfo, ReasoningMarks, Terms};
pub use document::{Document, MAX_DEPTH};
pub use error::ErrorBody;
pub use fields::{Bounds, Fields};
pub use input::PromptInput;
pub use lease::{LeaseAsk, LeaseNote, MAX_LEASE_MS, lease_ttl};
pub use logprobs::{LogprobRequest, MAX_TOP, Position, Spelling};
pub use prompt::{AdapterChoice, Prompt, Routing};
pub use sampling::{Dialect, Fit, MAX_N, Sampling};
pub use timings::{MetaTimes, Timings, UsageTimes};
pub use tokenize::{DetokenizeRequest, DetokenizeResponse, TokenizeInput, TokenizeRequest, TokenizeResponse};
pub use vectors::{
    DocumentText, EmbeddingAnswer, EmbeddingEntry, EmbeddingRequest, MAX_TEXTS, RankedDocument, ReadUsage,
    RerankAnswer, RerankRequest, VectorText,
};

/// Prompts a request may carry.
pub const MAX_BATCH: usize = 1024;
/// Most sequences of a request: prompts times `n`.
pub const MAX_SEQUENCES: usize = 1024;

/// What of a model bounds the values of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Token ids are below this.
    pub vocab_size: u32,
    /// Prompt plus output may not exceed this many tokens.
    pub context_length: u32,
    /// Prompt plus output that the workers' KV pool can hold; what it does not hold is cut off, or refused if
    /// already the prompt is too long.
    pub pool_tokens: u32,
}
