//! Compiled modules on disk, so that a restart does not compile again. Ours only: nobody hands compiled code in.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use wasmtime::Engine;
use wasmtime::component::Component;

/// Bytes of the checksum before the code.
const SUM: usize = 32;

/// The file for a module's bytes under this engine's version, flags and CPU features.
fn path(folder: &Path, engine: &Engine, sha256: &str) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    engine.precompile_compatibility_hash().hash(&mut hasher);
    folder.join(format!("{sha256}-{:016x}.cwasm", hasher.finish()))
}

/// Compiled code is native code: it is only used from a folder that nobody else can write.
fn is_private(folder: &Path) -> bool {
    let ours = rustix::process::geteuid().as_raw();
    std::fs::symlink_metadata(folder)
        .is_ok_and(|data| data.is_dir() && data.uid() == ours && data.mode() & 0o022 == 0)
}

/// The compiled component, if it is there and whole.
pub(super) fn load(folder: &Path, engine: &Engine, sha256: &str) -> Option<Component> {
    if !is_private(folder) {
        return None;
    }
    let bytes = std::fs::read(path(folder, engine, sha256)).ok()?;
    let (sum, code) = bytes.split_at_checked(SUM)?;
    if Sha256::digest(code).as_slice() != sum {
        tracing::warn!(sha256, "a compiled module on disk is damaged; it is compiled again");
        return None;
    }
    deserialize(engine, code)
}

#[allow(unsafe_code, reason = "wasmtime trusts compiled code")]
fn deserialize(engine: &Engine, code: &[u8]) -> Option<Component> {
    // SAFETY: the bytes were written by `save` below into a folder that only this user can write, and their checksum
    // holds; wasmtime itself checks version, flags and CPU features.
    let component = unsafe { Component::deserialize(engine, code) };
    component.map_err(|error| tracing::debug!(%error, "a compiled module does not fit")).ok()
}

/// Keeps the compiled component. That it can't be kept only costs time.
pub(super) fn save(folder: &Path, engine: &Engine, sha256: &str, component: &Component) {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    if made.is_err() || !is_private(folder) {
        return;
    }
    let outcome = component.serialize().map_err(std::io::Error::other).and_then(|code| {
        let bytes = [Sha256::digest(&code).as_slice(), &code].concat();
        crate::disk::write(&path(folder, engine, sha256), &bytes)
    });
    if let Err(error) = outcome {
        tracing::warn!(%error, "a compiled module can't be kept");
    }
}
