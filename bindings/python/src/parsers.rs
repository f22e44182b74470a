//! Parsers across the border: ours for Python, and Python's for the router.
//!
//! A parser written in Python runs on the router's threads under the GIL; what it raises ends its request only.

use std::sync::{Arc, Mutex, PoisonError};

use branchline_core::{Error, Result};
use branchline_gateway::parsers::{
    REASONING_PARSERS, ReasoningEvent, ReasoningEvents, ReasoningFactory, ReasoningFormat, ReasoningParser,
    TOOL_PARSERS, ToolEvent, ToolEvents, ToolFactory, ToolFormat, ToolParser,
};
use pyo3::prelude::*;
use serde_json::Value;

use crate::errors::ConfigError;

type Events = Vec<(&'static str, String)>;

/// Makes a registered parser known to the router.
#[pyfunction]
pub(crate) fn add_parser(kind: &str, name: &str, maker: Py<PyAny>) -> PyResult<()> {
    let own = Own { name: name.to_owned(), maker };
    match kind {
        "tool_parsers" => TOOL_PARSERS.add(name, Arc::new(own)),
        "reasoning_parsers" => REASONING_PARSERS.add(name, Arc::new(own)),
        _ => return Err(ConfigError::new_err(format!("'{kind}' is no kind of parser"))),
    }
    Ok(())
}

/// Names of the built-in parsers of a kind.
#[pyfunction]
pub(crate) fn parser_names(kind: &str) -> Vec<&'static str> {
    match kind {
        "tool_parsers" => TOOL_PARSERS.built_in(),
        "reasoning_parsers" => REASONING_PARSERS.built_in(),
        _ => Vec::new(),
    }
}

/// A parser that Python registered.
struct Own {
    name: String,
    maker: Py<PyAny>,
}

impl Own {
    fn fail(&self, noun: &str, error: &PyErr) -> Error {
        Error::internal(format!("{noun} '{}' failed: {error}", self.name))
    }
}

impl ToolFactory for Own {
    fn special(&self) -> bool {
        Python::attach(|py| self.maker.call_method0(py, "special")?.extract(py)).unwrap_or(false)
    }

    fn parser(&self, tools: &[Value]) -> Result<Box<dyn ToolParser>> {
        let text = Value::Array(tools.to_vec()).to_string();
        let made = Python::attach(|py| self.maker.call_method1(py, "tools", (text,)));
        let parser = made.map_err(|error| self.fail("tool parser", &error))?;
        Ok(Box::new(OwnParser { name: self.name.clone(), parser }))
    }
}

impl ReasoningFactory for Own {
    fn parser(&self, opened: bool, closed: bool) -> Result<Box<dyn ReasoningParser>> {
        let made = Python::attach(|py| self.maker.call_method1(py, "reasoning", (opened, closed)));
        let parser = made.map_err(|error| self.fail("reasoning parser", &error))?;
        Ok(Box::new(OwnParser { name: self.name.clone(), parser }))
    }
}

struct OwnParser {
    name: String,
    parser: Py<PyAny>,
}

impl OwnParser {
    /// Calls `push` or, without a text, `finish`.
    fn call(&self, noun: &str, text: Option<&str>) -> Result<Vec<(String, String)>> {
        let called = Python::attach(|py| {
            let told = match text {
                Some(text) => self.parser.call_method1(py, "push", (text,))?,
                None => self.parser.call_method0(py, "finish")?,
            };
            told.extract::<Vec<(String, String)>>(py)
        });
        called.map_err(|error: PyErr| Error::internal(format!("{noun} '{}' failed: {error}", self.name)))
    }

    fn tools(&self, text: Option<&str>, out: &mut ToolEvents) -> Result<()> {
        for (kind, value) in self.call("tool parser", text)? {
            match kind.as_str() {
                "text" => out.text(&value),
                "call" if !value.is_empty() => out.call(value),
                "arguments" => out.arguments(&value),
                other => return Err(self.nonsense("tool parser", other)),
            }
        }
        Ok(())
    }

    fn reasoning(&self, text: Option<&str>, out: &mut ReasoningEvents) -> Result<()> {
        for (kind, value) in self.call("reasoning parser", text)? {
            match kind.as_str() {
                "text" => out.text(&value),
                "reasoning" => out.reasoning(&value),
                other => return Err(self.nonsense("reasoning parser", other)),
            }
        }
        Ok(())
    }

    fn nonsense(&self, noun: &str, kind: &str) -> Error {
        Error::internal(format!(
            "{noun} '{}' told of '{kind}', which is no event, or of a call without a name",
            self.name
        ))
    }
}

impl ToolParser for OwnParser {
    fn push(&mut self, text: &str, out: &mut ToolEvents) -> Result<()> {
        self.tools(Some(text), out)
    }

    fn finish(&mut self, out: &mut ToolEvents) -> Result<()> {
        self.tools(None, out)
    }
}

impl ReasoningParser for OwnParser {
    fn push(&mut self, text: &str, out: &mut ReasoningEvents) -> Result<()> {
        self.reasoning(Some(text), out)
    }

    fn finish(&mut self, out: &mut ReasoningEvents) -> Result<()> {
        self.reasoning(None, out)
    }
}

/// A built-in parser of tool calls.
#[pyclass(module = "branchline_router._native")]
pub(crate) struct NativeToolParser(Mutex<Box<dyn ToolParser>>);

#[pymethods]
impl NativeToolParser {
    #[new]
    fn new(name: &str, tools: &str) -> PyResult<Self> {
        let format =
            ToolFormat::named(name).ok_or_else(|| ConfigError::new_err(TOOL_PARSERS.unknown(name)))?;
        let tools: Vec<Value> = serde_json::from_str(tools)
            .map_err(|error| ConfigError::new_err(format!("the tools are no JSON array: {error}")))?;
        let parser = ToolFactory::parser(format, &tools).map_err(refuse)?;
        Ok(Self(Mutex::new(parser)))
    }

    fn push(&mut self, text: &str) -> PyResult<Events> {
        let mut out = ToolEvents::default();
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner).push(text, &mut out).map_err(refuse)?;
        Ok(told(out))
    }

    fn finish(&mut self) -> PyResult<Events> {
        let mut out = ToolEvents::default();
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner).finish(&mut out).map_err(refuse)?;
        Ok(told(out))
    }
}

fn told(events: ToolEvents) -> Events {
    let one = |event| match event {
        ToolEvent::Text(text) => ("text", text),
        ToolEvent::Call { name } => ("call", name),
        ToolEvent::Arguments(json) => ("arguments", json),
    };
    events.into_vec().into_iter().map(one).collect()
}

/// A built-in parser of reasoning.
#[pyclass(module = "branchline_router._native")]
pub(crate) struct NativeReasoningParser(Mutex<Box<dyn ReasoningParser>>);

#[pymethods]
impl NativeReasoningParser {
    #[new]
    fn new(name: &str, opened: bool, closed: bool) -> PyResult<Self> {
        let format = ReasoningFormat::named(name)
            .ok_or_else(|| ConfigError::new_err(REASONING_PARSERS.unknown(name)))?;
        Ok(Self(Mutex::new(format.parser(opened, closed))))
    }

    fn push(&mut self, text: &str) -> PyResult<Events> {
        let mut out = ReasoningEvents::default();
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner).push(text, &mut out).map_err(refuse)?;
        Ok(thought(out))
    }

    fn finish(&mut self) -> PyResult<Events> {
        let mut out = ReasoningEvents::default();
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner).finish(&mut out).map_err(refuse)?;
        Ok(thought(out))
    }
}

fn thought(events: ReasoningEvents) -> Events {
    let one = |event| match event {
        ReasoningEvent::Reasoning(text) => ("reasoning", text),
        ReasoningEvent::Text(text) => ("text", text),
    };
    events.into_vec().into_iter().map(one).collect()
}

fn refuse(error: Error) -> PyErr {
    ConfigError::new_err(error.to_string())
}
