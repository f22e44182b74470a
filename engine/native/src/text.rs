//! `Vocabulary` and `TextStream` for Python. Tokenising releases the GIL; a push is too short to.

use std::sync::Arc;

use branchline_text::{self as text, TextOptions, Tokenizer};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::convert::{Numbers, value_error};

/// What a push answers: text now safe to send, tokens consumed, the stop that matched.
type Step = (String, usize, Option<String>);

/// A tokenizer and the bytes of its ids; immutable, shared by all streams.
#[pyclass(module = "branchline._native", frozen)]
pub(crate) struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
}

#[pymethods]
impl Vocabulary {
    #[staticmethod]
    fn from_tokenizer_json(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        let tokenizer = py.detach(|| Tokenizer::from_json(data)).map_err(value_error)?;
        Ok(Self { tokenizer: Arc::new(tokenizer) })
    }

    fn __len__(&self) -> usize {
        self.tokenizer.vocabulary().len()
    }

    fn token_bytes<'py>(&self, py: Python<'py>, token_id: u32) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.tokenizer.vocabulary().bytes(token_id))
    }

    fn is_special(&self, token_id: u32) -> bool {
        self.tokenizer.vocabulary().is_special(token_id)
    }

    #[pyo3(signature = (text, add_special_tokens = false))]
    fn encode(&self, py: Python<'_>, text: &str, add_special_tokens: bool) -> PyResult<Vec<u32>> {
        py.detach(|| self.tokenizer.encode(text, add_special_tokens)).map_err(value_error)
    }

    #[pyo3(signature = (token_ids, skip_special_tokens = true))]
    fn decode(&self, py: Python<'_>, token_ids: Numbers, skip_special_tokens: bool) -> String {
        py.detach(|| self.tokenizer.decode(&token_ids.0, skip_special_tokens))
    }
}

/// The text of one sequence, token by token.
#[pyclass(module = "branchline._native")]
pub(crate) struct TextStream {
    inner: text::TextStream,
}

#[pymethods]
impl TextStream {
    #[new]
    #[pyo3(
        signature = (vocabulary, stop = Vec::new(), *, skip_special_tokens = true, include_stop = false, min_tokens = 0),
        text_signature = "(vocabulary, stop=(), *, skip_special_tokens=True, include_stop=False, min_tokens=0)"
    )]
    fn new(
        vocabulary: &Vocabulary,
        stop: Vec<String>,
        skip_special_tokens: bool,
        include_stop: bool,
        min_tokens: usize,
    ) -> PyResult<Self> {
        let options = TextOptions { stop, skip_special: skip_special_tokens, include_stop, min_tokens };
        let vocabulary = Arc::clone(vocabulary.tokenizer.vocabulary());
        text::TextStream::new(vocabulary, options).map(|inner| Self { inner }).map_err(value_error)
    }

    fn push(&mut self, token_ids: Numbers) -> Step {
        step(self.inner.push(&token_ids.0))
    }

    fn finish(&mut self) -> String {
        self.inner.finish()
    }
}

fn step(step: text::TextStep) -> Step {
    (step.text, step.consumed, step.matched)
}

/// Pushes one token to each stream, in one call for a whole step of the loop.
#[pyfunction]
pub(crate) fn push_many(streams: Vec<Bound<'_, TextStream>>, token_ids: Numbers) -> PyResult<Vec<Step>> {
    if streams.len() != token_ids.0.len() {
        let counts = (streams.len(), token_ids.0.len());
        let message = format!("{} streams but {} token ids: give one id a stream", counts.0, counts.1);
        return Err(PyValueError::new_err(message));
    }
    let pairs = streams.iter().zip(token_ids.0);
    pairs.map(|(stream, id)| Ok(step(stream.try_borrow_mut()?.inner.push(&[id])))).collect()
}
