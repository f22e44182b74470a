//! What a sequence says: its text split into reasoning, answer and tool calls, whatever the API family.

use std::sync::Arc;

use branchline_core::Result;
use branchline_protocol::openai::{ChatRequest, FinishReason, ToolChoice};
use branchline_protocol::{ReasoningMarks, Sampling};
use branchline_text::parse::{
    ReasoningEvent, ReasoningEvents, ReasoningParser, ToolEvent, ToolEvents, ToolParser, opens_reasoning,
};
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::app::App;
use crate::dispatch::{Model, Piece};
use crate::parsers::{ReasoningFactory, TOOL_PARSERS, ToolFactory};

/// News of a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Said {
    /// Of the answer.
    Text(String),
    /// Of the reasoning before it.
    Reasoning(String),
    /// A call begins.
    Call {
        /// Which of the sequence's calls.
        index: u32,
        /// Made here.
        id: String,
        /// Whole.
        name: String,
    },
    /// Of a call's arguments.
    Arguments {
        /// Which call.
        index: u32,
        /// JSON text.
        json: String,
    },
}

/// How the sequences of one request are read.
pub(super) struct Manner {
    tools: Option<ToolManner>,
    reasoning: Option<Arc<dyn ReasoningFactory>>,
    /// Of the reasoning that a constrained answer may begin with.
    marks: Option<ReasoningMarks>,
    opened: bool,
    closed: bool,
    single: bool,
    definitions: Vec<Value>,
}

enum ToolManner {
    Parsed(Arc<dyn ToolFactory>),
    /// The whole answer is the arguments of this tool.
    Forced(String),
}

impl Manner {
    /// By the options, the model and what the request asks for.
    pub(super) fn of(app: &App, model: &Model, request: &ChatRequest) -> Self {
        let tools = &request.tools;
        let parsed = match &tools.choice {
            _ if tools.list.is_empty() => None,
            ToolChoice::None => None,
            ToolChoice::Auto => app.options.tool_call_parser.0.tools(model).map(ToolManner::Parsed),
            // The constraint makes it an array of calls, whatever the model is used to.
            ToolChoice::Required => TOOL_PARSERS.get("json").map(ToolManner::Parsed),
            ToolChoice::Named(name) => Some(ToolManner::Forced(name.clone())),
        };
        let format = app.options.reasoning_parser.0.reasoning(model);
        let (marks, separate) =
            constrained(request, format.as_ref().and_then(|format| format.marks()), parsed.is_some());
        Self {
            tools: parsed,
            reasoning: format.filter(|_| separate),
            marks,
            opened: false,
            closed: false,
            single: tools.single,
            definitions: tools.list.clone(),
        }
    }

    /// Takes the rendered prompt, whose end may lie within the reasoning.
    pub(super) fn after(&mut self, prompt: &str) {
        (self.opened, self.closed) = opens_reasoning(prompt);
    }

    /// Gives a constraint the marks of the reasoning before it.
    pub(super) fn mark(&self, sampling: &mut Sampling) -> Result<()> {
        sampling.terms.marks.clone_from(&self.marks);
        sampling.terms.check(sampling.constraint.is_some())
    }

    /// Whether the text must keep special tokens.
    pub(super) fn keeps_special(&self) -> bool {
        matches!(&self.tools, Some(ToolManner::Parsed(factory)) if factory.special())
    }

    /// A speaker for one sequence.
    pub(super) fn speaker(&self) -> Result<Speaker> {
        let tools = match &self.tools {
            Some(ToolManner::Parsed(factory)) => Calls::Parsed(factory.parser(&self.definitions)?),
            Some(ToolManner::Forced(name)) => Calls::Forced(name.clone()),
            None => Calls::None,
        };
        let reasoning = match &self.reasoning {
            Some(factory) => Some(factory.parser(self.opened, self.closed)?),
            None => None,
        };
        Ok(Speaker::new(tools, reasoning, self.single))
    }
}

/// The marks of the reasoning before a constrained answer, and whether reasoning is told apart at all. Where the
/// marks are not known the constraint holds from the first token; where reasoning stays in the text, calls can't
/// follow it.
fn constrained(
    request: &ChatRequest,
    marks: Option<ReasoningMarks>,
    calls: bool,
) -> (Option<ReasoningMarks>, bool) {
    if request.sampling.constraint.is_none() {
        return (None, request.separate_reasoning);
    }
    let marks = marks.filter(|_| request.separate_reasoning || !calls);
    let separate = request.separate_reasoning && marks.is_some();
    (marks, separate)
}

enum Calls {
    None,
    Parsed(Box<dyn ToolParser>),
    Forced(String),
}

/// Reads one sequence's text.
pub(super) struct Speaker {
    calls: Calls,
    reasoning: Option<Box<dyn ReasoningParser>>,
    called: u32,
    /// The arguments of the call that is being told of.
    arguments: Option<String>,
    /// A call has been told of whole.
    whole: bool,
    single: bool,
    seen: bool,
    thought: Thought,
}

/// The tokens of a sequence's reasoning, its marks among them. Of a piece that holds reasoning and answer each has
/// its share by bytes.
#[derive(Debug, Default)]
struct Thought {
    tokens: u64,
    /// Of pieces that have said nothing yet.
    held: u64,
    over: bool,
}

impl Thought {
    /// Takes a piece of so many tokens and what it says.
    fn take(&mut self, tokens: u64, events: &[ReasoningEvent]) {
        let (mut reasoning, mut answer) = (0, 0);
        for event in events {
            match event {
                ReasoningEvent::Reasoning(text) => reasoning += text.len() as u64,
                ReasoningEvent::Text(text) => answer += text.len() as u64,
            }
        }
        if self.over {
            return;
        }
        if reasoning + answer == 0 {
            self.held += tokens;
            return;
        }
        let held = std::mem::take(&mut self.held);
        self.over = answer > 0;
        if reasoning + self.tokens > 0 {
            self.tokens += held + tokens * reasoning / (reasoning + answer);
        }
    }
}

impl Speaker {
    fn new(calls: Calls, reasoning: Option<Box<dyn ReasoningParser>>, single: bool) -> Self {
        Self {
            calls,
            reasoning,
            called: 0,
            arguments: None,
            whole: false,
            single,
            seen: false,
            thought: Thought::default(),
        }
    }

    /// Tokens of the reasoning so far.
    pub(super) fn reasoning_tokens(&self) -> u64 {
        self.thought.tokens
    }

    /// What a piece says. The end of the sequence releases what was held back.
    pub(super) fn read(&mut self, piece: &mut Piece) -> Result<Vec<Said>> {
        let mut said = Vec::new();
        let text = std::mem::take(&mut piece.text);
        match &mut self.reasoning {
            None => self.answer(text, &mut said)?,
            Some(parser) => {
                let mut events = ReasoningEvents::default();
                parser.push(&text, &mut events)?;
                let events = events.into_vec();
                self.thought.take(piece.token_ids.len() as u64, &events);
                self.reasoned(events, &mut said)?;
            }
        }
        if let Some(end) = &mut piece.end {
            self.finish(&mut said)?;
            if self.whole && end.reason == FinishReason::Stop {
                end.reason = FinishReason::ToolCalls;
                end.matched = None;
            }
        }
        Ok(said)
    }

    fn reasoned(&mut self, events: Vec<ReasoningEvent>, said: &mut Vec<Said>) -> Result<()> {
        for event in events {
            match event {
                ReasoningEvent::Reasoning(text) => said.push(Said::Reasoning(text)),
                ReasoningEvent::Text(text) => self.answer(text, said)?,
            }
        }
        Ok(())
    }

    fn finish(&mut self, said: &mut Vec<Said>) -> Result<()> {
        if let Some(parser) = &mut self.reasoning {
            let mut events = ReasoningEvents::default();
            parser.finish(&mut events)?;
            let events = events.into_vec();
            self.thought.take(0, &events);
            self.reasoned(events, said)?;
        }
        if let Calls::Parsed(parser) = &mut self.calls {
            let mut events = ToolEvents::default();
            parser.finish(&mut events)?;
            self.told(events, said);
            self.settle();
        }
        Ok(())
    }

    /// No more of the last call comes. One that broke off, whose arguments are not whole, is none to be carried out.
    fn settle(&mut self) {
        let is_whole = |json: &str| json.is_empty() || serde_json::from_str::<IgnoredAny>(json).is_ok();
        self.whole |= self.arguments.take().is_some_and(|json| is_whole(&json));
    }

    fn answer(&mut self, text: String, said: &mut Vec<Said>) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        match &mut self.calls {
            Calls::None => said.push(Said::Text(text)),
            Calls::Parsed(parser) => {
                let mut events = ToolEvents::default();
                parser.push(&text, &mut events)?;
                self.told(events, said);
            }
            Calls::Forced(name) => {
                if !std::mem::replace(&mut self.seen, true) {
                    (self.called, self.whole) = (1, true);
                    said.push(Said::Call { index: 0, id: call_id(), name: std::mem::take(name) });
                }
                said.push(Said::Arguments { index: 0, json: text });
            }
        }
        Ok(())
    }

    /// Where one call at most was asked for, nothing counts from the second on.
    fn told(&mut self, events: ToolEvents, said: &mut Vec<Said>) {
        for event in events.into_vec() {
            if self.single && self.seen {
                return;
            }
            match event {
                ToolEvent::Text(text) => said.push(Said::Text(text)),
                ToolEvent::Call { .. } if self.single && self.called == 1 => self.seen = true,
                ToolEvent::Call { name } => {
                    self.settle();
                    self.arguments = Some(String::new());
                    said.push(Said::Call { index: self.called, id: call_id(), name });
                    self.called += 1;
                }
                ToolEvent::Arguments(json) => {
                    self.arguments.get_or_insert_default().push_str(&json);
                    said.push(Said::Arguments { index: self.called.saturating_sub(1), json });
                }
            }
        }
    }
}

fn call_id() -> String {
    format!("call_{}", uuid::Uuid::new_v4().simple())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::End;
    use branchline_text::parse::ToolFormat;

    fn speaker(single: bool) -> Speaker {
        let parser = ToolFormat::named("hermes").expect("it is built in").parser(&[]);
        Speaker::new(Calls::Parsed(parser), None, single)
    }

    fn end(reason: FinishReason) -> End {
        End {
            reason,
            matched: None,
            completion_tokens: 1,
            retractions: 0,
            continuations: 0,
            grammar: None,
            timings: None,
            message: String::new(),
        }
    }

    fn piece(text: &str, reason: FinishReason) -> Piece {
        Piece { text: text.to_owned(), end: Some(end(reason)), ..Piece::default() }
    }

    const CALL: &str = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";

    #[test]
    fn a_stop_after_a_call_is_a_tool_call_and_a_cut_stays_a_cut() {
        for (reason, wanted) in
            [(FinishReason::Stop, FinishReason::ToolCalls), (FinishReason::Length, FinishReason::Length)]
        {
            let mut piece = piece(CALL, reason);
            let said = speaker(false).read(&mut piece).unwrap();
            assert!(matches!(&said[0], Said::Call { index: 0, name, .. } if name == "f"), "{said:?}");
            assert_eq!(piece.end.unwrap().reason, wanted);
        }
    }

    #[test]
    fn a_stop_is_no_tool_call_where_no_call_is_whole() {
        let begun = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": ";
        for (text, wanted) in [
            (format!("{begun}}}}}</tool_call>"), FinishReason::Stop),
            (begun.to_owned(), FinishReason::Stop),
            ("<tool_call>{\"name\": \"f\", \"arguments\": foo}</tool_call>".to_owned(), FinishReason::Stop),
            (format!("{CALL}{begun}}}"), FinishReason::ToolCalls),
            (format!("{begun}}} {CALL}"), FinishReason::ToolCalls),
        ] {
            let mut piece = piece(&text, FinishReason::Stop);
            speaker(false).read(&mut piece).unwrap();
            assert_eq!(piece.end.unwrap().reason, wanted, "{text}");
        }
    }

    #[test]
    fn where_one_call_was_asked_for_no_second_is_told() {
        let calls = |single| {
            let mut two = piece(&format!("{CALL}\n{CALL}"), FinishReason::Stop);
            let said = speaker(single).read(&mut two).unwrap();
            said.iter().filter(|one| matches!(one, Said::Call { .. })).count()
        };
        assert_eq!((calls(true), calls(false)), (1, 2));
    }

    #[test]
    fn tokens_of_reasoning_are_counted_up_to_its_end() {
        let reasoning = |text: &str| ReasoningEvent::Reasoning(text.into());
        let answer = |text: &str| ReasoningEvent::Text(text.into());
        let count = |pieces: &[(u64, &[ReasoningEvent])]| {
            let mut thought = Thought::default();
            pieces.iter().for_each(|(tokens, events)| thought.take(*tokens, events));
            thought.tokens
        };
        // A mark that opens, two words, a mark that closes, and what is no more of it.
        let thinks: [(u64, &[ReasoningEvent]); 6] = [
            (1, &[]),
            (1, &[reasoning("so")]),
            (1, &[reasoning("why")]),
            (1, &[]),
            (3, &[answer("a")]),
            (5, &[]),
        ];
        assert_eq!(count(&thinks), 4);
        assert_eq!(count(&[(1, &[]), (2, &[answer("a")]), (1, &[reasoning("late")])]), 0);
        assert_eq!(count(&[(8, &[reasoning("abc"), answer("d")])]), 6);
        assert_eq!(count(&[(4, &[]), (0, &[reasoning("cut")])]), 4);
    }

    #[test]
    fn a_forced_tools_arguments_are_the_whole_answer() {
        let mut speaker = Speaker::new(Calls::Forced("add".into()), None, false);
        let mut said = speaker.read(&mut Piece { text: "{\"a\"".into(), ..Piece::default() }).unwrap();
        let mut last = piece(": 1}", FinishReason::Stop);
        said.extend(speaker.read(&mut last).unwrap());
        assert!(matches!(&said[0], Said::Call { name, .. } if name == "add"));
        let json: String = said
            .iter()
            .filter_map(|one| match one {
                Said::Arguments { json, .. } => Some(json.as_str()),
                _ => None,
            })
            .collect();
        assert_eq!((json.as_str(), last.end.unwrap().reason), ("{\"a\": 1}", FinishReason::ToolCalls));
    }
}
