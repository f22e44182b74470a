//! `/v1/embeddings` and `/v1/rerank`: what is read of a request and how its answer looks.

use branchline_core::{Error, Result};
use serde::Serialize;
use serde_json::Value;

use crate::Limits;
use crate::fields::{Fields, wrong};
use crate::prompt::{Prompt, prompts_up_to};
use crate::refused::unimplemented;

/// Texts, or documents, that one request may carry.
pub const MAX_TEXTS: usize = 2048;
/// More than any model's vectors have; the model's own length is asked later.
const MAX_DIMENSIONS: u32 = 1 << 16;

/// A request of `/v1/embeddings`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmbeddingRequest {
    /// What to embed.
    pub inputs: Vec<Prompt>,
    /// Whether `input` held one text, and not a list.
    pub single: bool,
    /// Answer each vector as base64 of little-endian float32, not as an array.
    pub base64: bool,
    /// Leading values to keep of each vector.
    pub dimensions: Option<u32>,
    /// Cut longer texts to so many tokens, marks included, instead of refusing them.
    pub truncate: Option<u32>,
}

impl EmbeddingRequest {
    /// Reads a request.
    ///
    /// # Errors
    /// `InvalidArgument` naming the field.
    pub fn read(fields: &Fields<'_>, limits: Limits) -> Result<Self> {
        let path = fields.path("input");
        let Some(input) = fields.get("input") else {
            let message = format!("`{path}` is missing; send a text, token ids or an array of them");
            return Err(Error::invalid(path.as_str(), message));
        };
        let base64 = match fields.string("encoding_format")? {
            None | Some("float") => false,
            Some("base64") => true,
            Some(other) => {
                let path = fields.path("encoding_format");
                return Err(Error::invalid(
                    path.as_str(),
                    format!("`{path}` must be \"float\" or \"base64\", not {other:?}"),
                ));
            }
        };
        let listed = matches!(input, Value::Array(items) if matches!(items.first(), Some(Value::String(_) | Value::Array(_))));
        Ok(Self {
            inputs: prompts_up_to(MAX_TEXTS, input, &path, limits)?,
            single: !listed,
            base64,
            dimensions: fields.unsigned("dimensions", 1..=MAX_DIMENSIONS)?,
            truncate: truncate(fields, limits)?,
        })
    }
}

/// A request of `/v1/rerank`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RerankRequest {
    /// What the documents should answer.
    pub query: String,
    /// Their texts.
    pub documents: Vec<String>,
    /// How many of the best to answer; all if absent.
    pub top_n: Option<usize>,
    /// Whether results carry the documents' texts.
    pub return_documents: bool,
    /// As in [`EmbeddingRequest`]: of the query and a document together, the document is cut.
    pub truncate: Option<u32>,
}

impl RerankRequest {
    /// Reads a request.
    ///
    /// # Errors
    /// `InvalidArgument` naming the field, `Unimplemented` for known fields not served.
    pub fn read(fields: &Fields<'_>, limits: Limits) -> Result<Self> {
        for name in ["max_tokens_per_doc", "max_chunks_per_doc", "rank_fields"] {
            if fields.get(name).is_some() {
                let remedy = "leave it out; `truncate_prompt_tokens` cuts long documents";
                return Err(unimplemented(&fields.path(name), remedy));
            }
        }
        let query = fields.required("query")?;
        if query.is_empty() {
            let path = fields.path("query");
            return Err(Error::invalid(path.as_str(), format!("`{path}` is empty; send a text")));
        }
        let path = fields.path("documents");
        let items = fields.array("documents")?.unwrap_or_default();
        if !(1..=MAX_TEXTS).contains(&items.len()) {
            let message = format!("`{path}` has {} texts; send 1 to {MAX_TEXTS}", items.len());
            return Err(Error::invalid(path.as_str(), message));
        }
        let documents =
            items.iter().enumerate().map(|(position, item)| document(item, &format!("{path}[{position}]")));
        Ok(Self {
            query: query.to_owned(),
            documents: documents.collect::<Result<_>>()?,
            top_n: fields.unsigned("top_n", 1..=u32::MAX)?.map(|count| count as usize),
            return_documents: fields.bool("return_documents")?.unwrap_or(true),
            truncate: truncate(fields, limits)?,
        })
    }
}

fn document(item: &Value, path: &str) -> Result<String> {
    let (text, path) = match item {
        Value::Object(map) => (map.get("text").unwrap_or(&Value::Null), format!("{path}.text")),
        other => (other, path.to_owned()),
    };
    match text {
        Value::String(text) if !text.is_empty() => Ok(text.clone()),
        other => Err(wrong(&path, "a text, or an object with one as `text`", other)),
    }
}

/// `truncate_prompt_tokens`: a number of tokens, or -1 for as many as the model takes.
fn truncate(fields: &Fields<'_>, limits: Limits) -> Result<Option<u32>> {
    let most = i64::from(limits.context_length);
    Ok(match fields.integer("truncate_prompt_tokens", -1..=most)? {
        None => None,
        Some(-1) => Some(limits.context_length),
        Some(0) => {
            let path = fields.path("truncate_prompt_tokens");
            let message = format!("`{path}` is 0; send -1, or 1 to {most}");
            return Err(Error::invalid(path.as_str(), message));
        }
        Some(count) => Some(count as u32),
    })
}

/// A vector as clients ask for it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum VectorText {
    /// Numbers.
    Float(Vec<f32>),
    /// Base64 of little-endian float32.
    Base64(String),
}

/// One entry of an answer's `data`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EmbeddingEntry {
    /// `embedding`.
    pub object: &'static str,
    /// Position of its text in the request.
    pub index: usize,
    /// The vector.
    pub embedding: VectorText,
}

/// Tokens that were read; nothing is generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ReadUsage {
    /// Of all texts, marks included.
    pub prompt_tokens: usize,
    /// The same.
    pub total_tokens: usize,
}

impl ReadUsage {
    /// Usage of so many tokens.
    pub fn of(tokens: usize) -> Self {
        Self { prompt_tokens: tokens, total_tokens: tokens }
    }
}

/// The answer of `/v1/embeddings`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EmbeddingAnswer<'a> {
    /// `list`.
    pub object: &'static str,
    /// One entry a text, in order.
    pub data: Vec<EmbeddingEntry>,
    /// As the client named it.
    pub model: &'a str,
    /// Tokens.
    pub usage: ReadUsage,
}

/// One document's place.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RankedDocument {
    /// Position in the request.
    pub index: usize,
    /// Higher is better.
    pub relevance_score: f32,
    /// Its text, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub document: Option<DocumentText>,
}

/// A document's text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DocumentText {
    /// As it came.
    pub text: String,
}

/// The answer of `/v1/rerank`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RerankAnswer<'a> {
    /// Of the request.
    pub id: &'a str,
    /// As the client named it.
    pub model: &'a str,
    /// The best first.
    pub results: Vec<RankedDocument>,
    /// Tokens.
    pub usage: ReadUsage,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const LIMITS: Limits = Limits { vocab_size: 100, context_length: 10, pool_tokens: 10 };

    fn embedding(value: Value) -> Result<EmbeddingRequest> {
        EmbeddingRequest::read(&Fields::of(&value, "").unwrap(), LIMITS)
    }

    fn rerank(value: Value) -> Result<RerankRequest> {
        RerankRequest::read(&Fields::of(&value, "").unwrap(), LIMITS)
    }

    #[test]
    fn every_form_of_input_is_read() {
        for (input, count, single) in [
            (json!("a"), 1, true),
            (json!([1, 2]), 1, true),
            (json!(["a"]), 1, false),
            (json!(["a", "b"]), 2, false),
            (json!([[1], [2, 3]]), 2, false),
            (json!(vec!["a"; MAX_TEXTS]), MAX_TEXTS, false),
        ] {
            let read = embedding(json!({"input": input})).unwrap();
            assert_eq!((read.inputs.len(), read.single), (count, single));
        }
        let read = embedding(json!({
            "input": "a", "encoding_format": "base64", "dimensions": 8, "truncate_prompt_tokens": -1, "user": "u"
        }));
        let read = read.unwrap();
        assert_eq!((read.base64, read.dimensions, read.truncate), (true, Some(8), Some(10)));
    }

    #[test]
    fn what_can_not_be_embedded_is_refused_with_its_place() {
        for (value, field) in [
            (json!({}), "input"),
            (json!({"input": ""}), "input"),
            (json!({"input": []}), "input"),
            (json!({"input": ["a", ""]}), "input[1]"),
            (json!({"input": ["a", 1]}), "input[1]"),
            (json!({"input": [[1], [100]]}), "input[1][0]"),
            (json!({"input": {"a": 1}}), "input"),
            (json!({"input": vec!["a"; MAX_TEXTS + 1]}), "input"),
            (json!({"input": "a", "encoding_format": "int8"}), "encoding_format"),
            (json!({"input": "a", "encoding_format": 1}), "encoding_format"),
            (json!({"input": "a", "dimensions": 0}), "dimensions"),
            (json!({"input": "a", "dimensions": "8"}), "dimensions"),
            (json!({"input": "a", "truncate_prompt_tokens": 0}), "truncate_prompt_tokens"),
            (json!({"input": "a", "truncate_prompt_tokens": 11}), "truncate_prompt_tokens"),
        ] {
            let error = embedding(value.clone()).expect_err(&value.to_string());
            assert_eq!(error.field.as_deref(), Some(field), "{value}");
        }
    }

    #[test]
    fn documents_are_texts_or_objects_with_one() {
        let read = rerank(json!({"query": "q", "documents": ["a", {"text": "b", "id": 1}], "top_n": 1}));
        let read = read.unwrap();
        assert_eq!(
            (read.documents, read.top_n, read.return_documents),
            (vec!["a".into(), "b".into()], Some(1), true)
        );
        for (value, field) in [
            (json!({"documents": ["a"]}), "query"),
            (json!({"query": "", "documents": ["a"]}), "query"),
            (json!({"query": "q"}), "documents"),
            (json!({"query": "q", "documents": []}), "documents"),
            (json!({"query": "q", "documents": "a"}), "documents"),
            (json!({"query": "q", "documents": ["a", ""]}), "documents[1]"),
            (json!({"query": "q", "documents": [{"title": "a"}]}), "documents[0].text"),
            (json!({"query": "q", "documents": vec!["a"; MAX_TEXTS + 1]}), "documents"),
            (json!({"query": "q", "documents": ["a"], "top_n": 0}), "top_n"),
            (json!({"query": "q", "documents": ["a"], "max_tokens_per_doc": 5}), "max_tokens_per_doc"),
        ] {
            let error = rerank(value.clone()).expect_err(&value.to_string());
            assert_eq!(error.field.as_deref(), Some(field), "{value}");
        }
    }
}
