//! OpenAI's Responses API: requests brought into the chat form, and their items.

mod request;

pub use request::{ResponsesRequest, message_of, normalise};
