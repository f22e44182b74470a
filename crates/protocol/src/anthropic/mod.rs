//! Anthropic's Messages API: requests brought into the chat form, errors in its own shape.

mod error;
mod request;

pub use error::{error_body, error_kind};
pub use request::MessagesRequest;
