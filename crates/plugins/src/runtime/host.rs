//! The host functions of `branchline:middleware/host`, and WASI preview 2 beside them.

use std::sync::OnceLock;
use std::time::Instant;

use rand::Rng as _;
use wasmtime::component::{ComponentType, Lift, Linker, Lower};
use wasmtime::{Engine, Result, StoreContextMut};

use super::guest::Guest;
use crate::state::{Level, now_ms};

/// Bytes of randomness a call of `random`.
const RANDOM_CAP: u32 = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ComponentType, Lift, Lower)]
#[component(enum)]
#[repr(u8)]
#[allow(dead_code, reason = "made by lifting")]
enum HostLevel {
    #[component(name = "debug")]
    Debug,
    #[component(name = "info")]
    Info,
    #[component(name = "warn")]
    Warn,
    #[component(name = "error")]
    Error,
}

impl From<HostLevel> for Level {
    fn from(level: HostLevel) -> Self {
        match level {
            HostLevel::Debug => Self::Debug,
            HostLevel::Info => Self::Info,
            HostLevel::Warn => Self::Warn,
            HostLevel::Error => Self::Error,
        }
    }
}

type Caller<'a> = StoreContextMut<'a, Guest>;

/// Everything that modules may import.
pub(super) fn linker(engine: &Engine) -> Result<Linker<Guest>> {
    let mut linker = Linker::new(engine);
    wasmtime_wasi::p2::add_to_linker_async(&mut linker)?;
    let mut host = linker.instance("branchline:middleware/host@1.0.0")?;
    host.func_wrap("log", |mut caller: Caller<'_>, (level, message): (HostLevel, String)| {
        caller.data_mut().log(level.into(), &message);
        Ok(())
    })?;
    host.func_wrap("config", |caller: Caller<'_>, (): ()| Ok((caller.data().config.to_string(),)))?;
    host.func_wrap("counter-add", |caller: Caller<'_>, (name, label, by): (String, String, u64)| {
        caller.data().state.counter_add(&name, &label, by);
        Ok(())
    })?;
    host.func_wrap("gauge-set", |caller: Caller<'_>, (name, label, value): (String, String, i64)| {
        caller.data().state.gauge_set(&name, &label, value);
        Ok(())
    })?;
    host.func_wrap(
        "histogram-observe",
        |caller: Caller<'_>, (name, label, value): (String, String, f64)| {
            caller.data().state.histogram_observe(&name, &label, value);
            Ok(())
        },
    )?;
    host.func_wrap("kv-get", |caller: Caller<'_>, (key,): (String,)| {
        Ok((caller.data().state.store.get(&key, Instant::now()),))
    })?;
    host.func_wrap("kv-set", |caller: Caller<'_>, (key, value, ttl): (String, Vec<u8>, u64)| {
        Ok((caller.data().state.store.set(&key, value, ttl, Instant::now()),))
    })?;
    host.func_wrap("kv-delete", |caller: Caller<'_>, (key,): (String,)| {
        caller.data().state.store.delete(&key);
        Ok(())
    })?;
    host.func_wrap("kv-add", |caller: Caller<'_>, (key, by, ttl): (String, i64, u64)| {
        Ok((caller.data().state.store.add(&key, by, ttl, Instant::now()),))
    })?;
    host.func_wrap("now-ms", |_: Caller<'_>, (): ()| Ok((now_ms(),)))?;
    host.func_wrap("monotonic-ns", |_: Caller<'_>, (): ()| {
        static BEGAN: OnceLock<Instant> = OnceLock::new();
        let elapsed = BEGAN.get_or_init(Instant::now).elapsed();
        Ok((u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX),))
    })?;
    host.func_wrap("random", |_: Caller<'_>, (length,): (u32,)| {
        let mut bytes = vec![0u8; length.min(RANDOM_CAP) as usize];
        rand::rng().fill_bytes(&mut bytes);
        Ok((bytes,))
    })?;
    Ok(linker)
}
