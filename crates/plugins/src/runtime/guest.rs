//! What stands behind one instance: its module's state, its limits, and WASI without files, network or environment.

use std::sync::Arc;

use wasmtime::component::ResourceTable;
use wasmtime::{Error, ResourceLimiter, Result};
use wasmtime_wasi::{WasiCtx, WasiCtxView, WasiView};

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
    pub(super) fn new(state: Arc<State>, config: Arc<str>, memory_cap: usize) -> Self {
        let bounds = Bounds { memory_cap, memory: 0, table: 0, hit: None, peak: 0 };
        Self { state, config, bounds, lines: 0, wasi: None }
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
        let wasi = self.wasi.get_or_insert_with(|| {
            Box::new((WasiCtx::builder().max_random_size(64 << 10).build(), ResourceTable::new()))
        });
        WasiCtxView { ctx: &mut wasi.0, table: &mut wasi.1 }
    }
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
