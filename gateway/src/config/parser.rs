//! The parsers of tool calls and reasoning as options: `auto`, `none`, or a registered name.

use super::value::{Shape, Value};
use crate::parsers::{Choice, REASONING_PARSERS, TOOL_PARSERS};

/// How tool calls are found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolParserChoice(pub Choice);

/// How reasoning is told apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReasoningParserChoice(pub Choice);

impl Value for ToolParserChoice {
    const SHAPE: Shape = Shape::Text;

    fn parse(texts: &[String]) -> Result<Self, String> {
        Choice::read(&String::parse(texts)?, &TOOL_PARSERS).map(Self)
    }
}

impl Value for ReasoningParserChoice {
    const SHAPE: Shape = Shape::Text;

    fn parse(texts: &[String]) -> Result<Self, String> {
        Choice::read(&String::parse(texts)?, &REASONING_PARSERS).map(Self)
    }
}
