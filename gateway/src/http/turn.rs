//! One turn of a chat on an engine, whatever the API family: render, tokenise, fit, start.

use branchline_core::Result;
use branchline_protocol::openai::ChatRequest;
use branchline_protocol::{Fit, Prompt};

use super::gather::Gathered;
use super::intake::{Head, Intake};
use super::speech::{Manner, Speaker};
use crate::dispatch::{self, Running};

/// A turn that a worker has taken.
pub(super) struct Turn {
    pub(super) head: Head,
    pub(super) jobs: Vec<Running>,
    /// One for each sequence.
    pub(super) speakers: Vec<Speaker>,
    pub(super) gathered: Gathered,
}

/// The ids of a chat.
pub(super) async fn tokens(
    intake: &Intake,
    chat: &ChatRequest,
    manner: &mut Manner,
    field: &str,
) -> Result<Vec<u32>> {
    let offload = &intake.app.offload;
    let text = dispatch::render(offload, &intake.model, chat.input.clone(), intake.bytes).await?;
    manner.after(&text);
    // The template has put the special tokens in its text.
    dispatch::encode(offload, &intake.model, Prompt::Text(text), false, field).await
}

/// Starts a turn; `prefix` begins its id unless the client gave one.
pub(super) async fn begin(
    intake: &Intake,
    mut chat: ChatRequest,
    fit: Fit<'_>,
    prefix: &str,
) -> Result<Turn> {
    let live = intake.register(chat.rid.take(), prefix)?;
    let mut manner = Manner::of(&intake.app, &intake.model, &chat);
    let tokens = tokens(intake, &chat, &mut manner, fit.prompt).await?;
    let ChatRequest { mut sampling, logprobs, routing, .. } = chat;
    manner.mark(&mut sampling)?;
    sampling.fit(tokens.len(), intake.limits(), fit)?;
    if manner.keeps_special() && sampling.skip_special_tokens.is_none() {
        sampling.skip_special_tokens = Some(false);
    }
    let head = intake.head(live.id());
    let speakers = (0..sampling.sequences()).map(|_| manner.speaker()).collect::<Result<Vec<_>>>()?;
    let jobs = vec![intake.start(live, tokens, (sampling, logprobs), routing).await?];
    let gathered = Gathered::new(&jobs);
    Ok(Turn { head, jobs, speakers, gathered })
}
