//! What stands behind one instance: its module's state, its limits, and WASI with what was granted of files and network.

use std::sync::Arc;

use wasmtime::component::ResourceTable;
use wasmtime::{Error, ResourceLimiter, Result};
use wasmtime_wasi::sockets::SocketAddrUse;
use wasmtime_wasi::{FsPerms, WasiCtx, WasiCtxView, WasiView};

use crate::grants::{Folder, Grants};
use crate::module::Module;
use crate::state::{Level, State};

/// Table elements of an instance, all its tables together.
const TABLE_CAP: usize = 400_000;
/// Log lines a call.
const LINES_CAP: u32 = 20;

/// Data of a store.
pub(crate) struct Guest {
    pub(super) state: Arc<State>,
    pub(super) config: Arc<str>,
    pub(super) bounds: Bounds,
    pub(super) lines: u32,
    grants: Arc<Grants>,
    wasi: Option<Box<(WasiCtx, ResourceTable)>>,
}

/// Memory and tables in use against what is allowed.
pub(super) struct Bounds {
    memory_cap: usize,
    memory: usize,
    table: usize,
    /// What was asked for beyond the bounds.
    pub(super) hit: Option<&'static str>,
    pub(super) peak: usize,
}

impl Guest {
    pub(super) fn new(module: &Module, memory_cap: usize) -> Self {
        let (state, config) = (Arc::clone(&module.state), Arc::clone(&module.config));
        let bounds = Bounds { memory_cap, memory: 0, table: 0, hit: None, peak: 0 };
        Self { state, config, bounds, lines: 0, grants: Arc::clone(&module.grants), wasi: None }
    }

    pub(super) fn log(&mut self, level: Level, message: &str) {
        self.lines += 1;
        if self.lines <= LINES_CAP {
            self.state.log(level, message);
        }
    }
}

impl WasiView for Guest {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        // Most modules never ask.
        let wasi = self
            .wasi
            .get_or_insert_with(|| Box::new((wasi_of(&self.grants, &self.state), ResourceTable::new())));
        WasiCtxView { ctx: &mut wasi.0, table: &mut wasi.1 }
    }
}

/// WASI without environment, output and name look-up; files and network only as granted.
fn wasi_of(grants: &Arc<Grants>, state: &State) -> WasiCtx {
    let mut builder = WasiCtx::builder();
    builder.max_random_size(64 << 10).allow_udp(false).allow_tcp(!grants.network.is_empty());
    for Folder { path, at, write } in &grants.folders {
        let permissions = if *write { FsPerms::ReadWrite } else { FsPerms::ReadOnly };
        if let Err(error) = builder.preopened_dir(path, at, permissions) {
            state.log(Level::Error, &format!("the folder {at} can't be opened ({error:#})"));
        }
    }
    let grants = Arc::clone(grants);
    builder.socket_addr_check(move |address, used| {
        let allowed = match used {
            SocketAddrUse::TcpConnect => grants.reaches(address),
            // Every connection begins with a free port of its own.
            SocketAddrUse::TcpBind => address.ip().is_unspecified() && address.port() == 0,
            _ => false,
        };
        Box::pin(std::future::ready(allowed))
    });
    builder.build()
}

impl ResourceLimiter for Bounds {
    fn memory_growing(&mut self, current: usize, desired: usize, _maximum: Option<usize>) -> Result<bool> {
        let total = self.memory - current.min(self.memory) + desired;
        // An error, not a refusal: a module that asks again for ever must end.
        if total > self.memory_cap {
            self.hit = Some("memory");
            return Err(Error::msg("the module wants more memory than it may have"));
        }
        self.memory = total;
        self.peak = self.peak.max(total);
        Ok(true)
    }

    fn table_growing(&mut self, current: usize, desired: usize, _maximum: Option<usize>) -> Result<bool> {
        let total = self.table - current.min(self.table) + desired;
        if total > TABLE_CAP {
            self.hit = Some("tables");
            return Err(Error::msg("the module wants larger tables than it may have"));
        }
        self.table = total;
        Ok(true)
    }
}
