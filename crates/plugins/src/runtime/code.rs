//! Compiled components: made off the request path, one at a time, each within its time, and checked before use.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use branchline_core::{Error, ErrorCode, Result};
use tokio::sync::{Semaphore, oneshot};
use wasmtime::component::{Component, ComponentExportIndex, InstancePre};

use super::guest::Guest;
use super::{Runtime, cache, lower_priority};
use crate::spec::Hook;

/// Which world a module is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum World {
    /// `branchline:middleware`.
    Own,
    /// `smg:gateway`, SGLang's.
    Smg,
}

/// A compiled component with the places of its hooks.
pub(crate) struct Code {
    pub(super) pre: InstancePre<Guest>,
    pub(crate) world: World,
    pub(super) about: Option<ComponentExportIndex>,
    hooks: [Option<ComponentExportIndex>; 5],
}

/// One compilation at a time: it takes a core and up to a gigabyte.
static COMPILING: Semaphore = Semaphore::const_new(1);

/// First bytes of a component; a core module has version 1 and layer 0.
const COMPONENT: [u8; 8] = [0, b'a', b's', b'm', 0x0d, 0, 1, 0];

impl Code {
    /// Whether the module exports the hook.
    pub(crate) fn has(&self, hook: Hook) -> bool {
        self.hook(hook).is_some()
    }

    /// Whether its contract knows no streams.
    pub(crate) fn skips_streams(&self) -> bool {
        self.world == World::Smg
    }

    pub(super) fn hook(&self, hook: Hook) -> Option<&ComponentExportIndex> {
        self.hooks[hook as usize].as_ref()
    }

    /// Compiles, or takes the compiled code from `folder`.
    ///
    /// # Errors
    /// `InvalidArgument` if the bytes are no component of a world that is known, `ResourceExhausted` if others are
    /// being compiled all the time, `DeadlineExceeded` if it takes longer than `limit`.
    pub(crate) async fn compile(
        bytes: Arc<[u8]>,
        sha256: String,
        folder: Option<Arc<Path>>,
        limit: Duration,
    ) -> Result<Arc<Self>> {
        check_magic(&bytes)?;
        let permit = match tokio::time::timeout(limit, COMPILING.acquire()).await {
            Ok(Ok(permit)) => permit,
            _ => {
                let message = "other modules are being compiled; try again later";
                return Err(Error::new(ErrorCode::ResourceExhausted, message).with_retry_after(limit));
            }
        };
        let (sender, receiver) = oneshot::channel();
        let work = move || {
            lower_priority();
            let compiled = Self::load(&bytes, &sha256, folder.as_deref());
            // Held to the true end, also when nobody waits any more.
            drop(permit);
            drop(sender.send(compiled));
        };
        std::thread::Builder::new()
            .name("wasm-compile".to_owned())
            .stack_size(8 << 20)
            .spawn(work)
            .map_err(|error| Error::internal(format!("no thread to compile a module on: {error}")))?;
        match tokio::time::timeout(limit, receiver).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(Error::invalid("module", "compiling the module failed; rebuild it")),
            Err(_) => {
                let message = format!("compiling took longer than {limit:?}; build a smaller module");
                Err(Error::new(ErrorCode::DeadlineExceeded, message))
            }
        }
    }

    fn load(bytes: &[u8], sha256: &str, folder: Option<&Path>) -> Result<Arc<Self>> {
        let runtime = Runtime::get()?;
        let cached = folder.and_then(|folder| cache::load(folder, &runtime.engine, sha256));
        let fresh = cached.is_none();
        let component = match cached {
            Some(component) => component,
            None => Component::from_binary(&runtime.engine, bytes).map_err(refused)?,
        };
        if fresh && let Some(folder) = folder {
            cache::save(folder, &runtime.engine, sha256, &component);
        }
        Self::link(runtime, &component).map(Arc::new)
    }

    fn link(runtime: &Runtime, component: &Component) -> Result<Self> {
        let find = |interface: &str, function: &str| {
            let instance = component.get_export_index(None, interface)?;
            component.get_export_index(Some(&instance), function)
        };
        let own = |hook: Hook| find(&format!("branchline:middleware/{}@1.0.0", hook.name()), "handle");
        let mut hooks = Hook::ALL.map(own);
        let mut world = World::Own;
        // The package had another name before it was moved out of SGLang's repository.
        for package in ["smg:gateway", "sgl:model-gateway"] {
            if hooks.iter().all(Option::is_none) {
                world = World::Smg;
                for (hook, name) in [(Hook::OnRequest, "on-request"), (Hook::OnResponse, "on-response")] {
                    hooks[hook as usize] = find(&format!("{package}/middleware-{name}"), name);
                }
            }
        }
        if hooks.iter().all(Option::is_none) {
            let message = "the module exports no hook; export branchline:middleware/on-request@1.0.0 or another of its \
                           hooks, or those of smg:gateway";
            return Err(Error::invalid("module", message));
        }
        let about = find("branchline:middleware/about@1.0.0", "describe");
        let pre = runtime.linker.instantiate_pre(component).map_err(|error| {
            let message = format!(
                "the module imports what the gateway does not have ({error:#}); build it for branchline:middleware 1.0.0"
            );
            Error::invalid("module", message)
        })?;
        Ok(Self { pre, world, about, hooks })
    }
}

fn check_magic(bytes: &[u8]) -> Result<()> {
    let words = match bytes {
        [0, b'a', b's', b'm', 1, 0, 0, 0, ..] => {
            "the module is a core module; make a component of it with `branchline-router wasm build`"
        }
        _ if bytes.starts_with(&COMPONENT) => return Ok(()),
        [0x7f, b'E', b'L', b'F', ..] => {
            "the module is compiled already, which is never accepted; send the component"
        }
        _ => "the module is no WebAssembly component; build one with `branchline-router wasm build`",
    };
    Err(Error::invalid("module", words))
}

fn refused(error: wasmtime::Error) -> Error {
    let message: String = format!("{error:#}").chars().take(400).collect();
    Error::invalid("module", format!("the module is refused: {message}"))
}
