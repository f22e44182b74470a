//! Discovery against a scripted API server. Times are real and short; whatever is asserted holds however slow a machine is.

mod following;
mod keeping;
mod script;
