//! What an engine serves, and the tokenizers, shared by all workers that have the same one.

use std::sync::Arc;

use branchline_text::{ChatTemplate, Tokenizer};

use crate::proto;

/// A model of at least one engine. Workers of the same model may differ in `info`; this is the first ready one's.
#[derive(Clone)]
pub struct Model {
    /// The first served name.
    pub name: String,
    /// Every name requests may use, the first included.
    pub names: Vec<String>,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template; absent if the model has none.
    pub chat_template: Option<Arc<ChatTemplate>>,
    /// Why there is none although the model brought one.
    pub chat_template_error: Option<String>,
    /// Whether plain prompts get the special tokens that the tokenizer adds.
    pub add_special_tokens: bool,
    /// Limits, special ids and defaults.
    pub info: proto::GetModelInfoResponse,
    /// Special tokens and the template's source.
    pub manifest: proto::TokenizerManifest,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("names", &self.names).field("info", &self.info).finish_non_exhaustive()
    }
}

impl Model {
    /// Whether nothing that requests can see differs.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.info == other.info && self.manifest == other.manifest
    }

    /// Whether it can be asked for a task: `generate`, `embed` or `rank`.
    pub fn can(&self, task: &str) -> bool {
        match self.info.tasks.is_empty() {
            true => task == "generate",
            false => self.info.tasks.iter().any(|own| own == task),
        }
    }

    /// Whether requests may call it `name`.
    pub fn has_name(&self, name: &str) -> bool {
        self.names.iter().any(|own| own == name)
    }
}
