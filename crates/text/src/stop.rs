//! A streaming Aho-Corasick automaton over stop strings' bytes, shared by the sequences of a request.
//!
//! Our own, because a stream needs what search libraries keep to themselves: after each byte, how long the
//! tail is that could still grow into a stop. Linear in the bytes fed; a few words a stop byte in memory.

use std::collections::VecDeque;

use branchline_core::{Error, Result};
use smallvec::SmallVec;

/// All stops of a request together may not be longer than this; the automaton has one state a byte.
const MAX_STOP_BYTES: usize = 1 << 20;

/// State 0 is the start: nothing matched.
pub(crate) type State = u32;

#[derive(Debug, Clone, Default)]
struct Node {
    next: SmallVec<[(u8, State); 2]>,
    fail: State,
    depth: u32,
    /// The longest stop that ends here, as an index into `stops`.
    output: Option<u32>,
    /// Bytes at the end that could still become a stop.
    hold: u32,
}

/// Compiled stop strings.
#[derive(Debug, Clone)]
pub struct StopStrings {
    nodes: Vec<Node>,
    stops: Vec<String>,
}

impl StopStrings {
    /// Compiles the stops; none is fine, duplicates too.
    ///
    /// # Errors
    /// `InvalidArgument` naming `stop[i]` if one is empty, or `stop` if all together exceed 1 MiB.
    pub fn new(stops: Vec<String>) -> Result<Self> {
        if let Some(index) = stops.iter().position(String::is_empty) {
            let message = format!("stop[{index}] is empty: give at least one character");
            return Err(Error::invalid(format!("stop[{index}]"), message));
        }
        let bytes: usize = stops.iter().map(String::len).sum();
        if bytes > MAX_STOP_BYTES {
            let message = format!("stop strings have {bytes} bytes together: give at most {MAX_STOP_BYTES}");
            return Err(Error::invalid("stop", message));
        }
        let mut automaton = Self { nodes: vec![Node::default()], stops };
        for index in 0..automaton.stops.len() {
            automaton.add(index);
        }
        automaton.link();
        Ok(automaton)
    }

    /// Whether there is nothing to look for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.stops.is_empty()
    }

    pub(crate) fn step(&self, mut state: State, byte: u8) -> State {
        loop {
            if let Some(next) = self.edge(state, byte) {
                return next;
            }
            if state == 0 {
                return 0;
            }
            state = self.nodes[state as usize].fail;
        }
    }

    /// The longest stop that ends in this state.
    pub(crate) fn matched(&self, state: State) -> Option<&str> {
        self.nodes[state as usize].output.map(|index| self.stops[index as usize].as_str())
    }

    /// How many of the last bytes could still become a stop.
    pub(crate) fn hold(&self, state: State) -> usize {
        self.nodes[state as usize].hold as usize
    }

    fn edge(&self, state: State, byte: u8) -> Option<State> {
        self.nodes[state as usize].next.iter().find(|(label, _)| *label == byte).map(|(_, next)| *next)
    }

    fn add(&mut self, index: usize) {
        let mut state = 0;
        for (depth, byte) in self.stops[index].bytes().enumerate() {
            state = match self.edge(state, byte) {
                Some(next) => next,
                None => {
                    let next = self.nodes.len() as State;
                    self.nodes.push(Node { depth: depth as u32 + 1, ..Node::default() });
                    self.nodes[state as usize].next.push((byte, next));
                    next
                }
            };
        }
        self.nodes[state as usize].output.get_or_insert(index as u32);
    }

    /// Sets fail links, outputs and holds in breadth-first order, so that a node's fail is ready before it.
    fn link(&mut self) {
        let mut queue = VecDeque::from([0]);
        while let Some(state) = queue.pop_front() {
            let node = self.nodes[state as usize].clone();
            for &(byte, next) in &node.next {
                self.nodes[next as usize].fail = if state == 0 { 0 } else { self.step(node.fail, byte) };
                queue.push_back(next);
            }
            if state != 0 {
                let fail = &self.nodes[node.fail as usize];
                let (output, hold) = (node.output.or(fail.output), fail.hold);
                let node = &mut self.nodes[state as usize];
                node.output = output;
                node.hold = if node.next.is_empty() { hold } else { node.depth };
            }
        }
    }
}
