//! The SGLang-native `/generate`: single or batch requests, cumulative text, `meta_info`.

mod answer;
mod request;

pub use answer::{Finish, GenerateAnswer, Meta, MetaLogprobs, Triple};
pub use request::{GenerateItem, GenerateRequest};
