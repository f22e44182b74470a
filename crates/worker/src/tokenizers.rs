//! Tokenizers by their checksum: many workers of one model share one in memory, read from one of them.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use branchline_core::{Error, ErrorCode, Result};
use branchline_text::Tokenizer;
use sha2::{Digest, Sha256};
use tokio::sync::Mutex;
use tonic::{Status, Streaming};

use crate::proto::get_tokenizer_response::Part;
use crate::proto::{GetTokenizerResponse, TokenizerManifest};

/// Largest tokenizer.json that is taken.
const LIMIT_BYTES: u64 = 256 << 20;

/// The one tokenizer with a checksum; locked while it is read, so that others wait instead of reading it again.
type Shelf = Arc<Mutex<Weak<Tokenizer>>>;

/// Living tokenizers by checksum.
#[derive(Default)]
pub(crate) struct Tokenizers {
    shelves: parking_lot::Mutex<HashMap<Vec<u8>, Shelf>>,
}

impl Tokenizers {
    /// Reads the manifest, and the tokenizer behind it unless a worker has brought the same one before.
    pub(crate) async fn fetch(
        &self,
        mut stream: Streaming<GetTokenizerResponse>,
    ) -> Result<(TokenizerManifest, Arc<Tokenizer>)> {
        let Some(Part::Manifest(manifest)) = next(&mut stream).await? else {
            return Err(nonsense("its first part is not a manifest"));
        };
        if manifest.tokenizer_json_bytes > LIMIT_BYTES {
            return Err(nonsense(&format!(
                "tokenizer.json of {} bytes is over the limit of {LIMIT_BYTES}",
                manifest.tokenizer_json_bytes
            )));
        }
        let shelf = self.shelf(&manifest.tokenizer_json_sha256);
        let mut place = shelf.lock().await;
        if let Some(tokenizer) = place.upgrade() {
            return Ok((manifest, tokenizer));
        }
        let json = read(&mut stream, &manifest).await?;
        let built = tokio::task::spawn_blocking(move || Tokenizer::from_json(&json))
            .await
            .map_err(|cause| Error::internal(format!("the tokenizer cannot be built: {cause}")))?;
        let tokenizer = Arc::new(built.map_err(|cause| nonsense(&cause.to_string()))?);
        *place = Arc::downgrade(&tokenizer);
        Ok((manifest, tokenizer))
    }

    fn shelf(&self, checksum: &[u8]) -> Shelf {
        let mut shelves = self.shelves.lock();
        // Empty shelves that nobody waits at are cleared away.
        shelves.retain(|_, shelf| {
            Arc::strong_count(shelf) > 1 || shelf.try_lock().is_ok_and(|place| place.strong_count() > 0)
        });
        shelves.entry(checksum.to_vec()).or_default().clone()
    }
}

async fn next(stream: &mut Streaming<GetTokenizerResponse>) -> Result<Option<Part>> {
    let failed = |status: Status| {
        Error::new(
            ErrorCode::UpstreamFailed,
            format!("GetTokenizer: {:?}: {}", status.code(), status.message()),
        )
    };
    Ok(stream.message().await.map_err(failed)?.and_then(|message| message.part))
}

async fn read(stream: &mut Streaming<GetTokenizerResponse>, manifest: &TokenizerManifest) -> Result<Vec<u8>> {
    let mut json = Vec::with_capacity(manifest.tokenizer_json_bytes as usize);
    while let Some(part) = next(stream).await? {
        let Part::TokenizerJson(bytes) = part else { return Err(nonsense("it has a second manifest")) };
        if (json.len() + bytes.len()) as u64 > manifest.tokenizer_json_bytes {
            return Err(nonsense("tokenizer.json is longer than its manifest says"));
        }
        json.extend_from_slice(&bytes);
    }
    if json.len() as u64 != manifest.tokenizer_json_bytes {
        return Err(nonsense(&format!(
            "tokenizer.json ended after {} of {} bytes",
            json.len(),
            manifest.tokenizer_json_bytes
        )));
    }
    if Sha256::digest(&json)[..] != manifest.tokenizer_json_sha256[..] {
        return Err(nonsense("tokenizer.json does not have the checksum of its manifest"));
    }
    Ok(json)
}

fn nonsense(what: &str) -> Error {
    Error::new(ErrorCode::UpstreamFailed, format!("the tokenizer of the worker cannot be used: {what}"))
}
