//! All modules of a gateway: loading, replacing, removing, keeping them on disk, and the order requests meet them in.
//!
//! Readers take a snapshot; changes are made one at a time and published whole.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use arc_swap::ArcSwap;
use branchline_core::{Error, ErrorCode, Result};
use branchline_telemetry::Metrics;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::sync::{Mutex, MutexGuard};
use uuid::Uuid;

use crate::disk::{Disk, Record};
use crate::grants::Grantable;
use crate::module::Module;
use crate::runtime::{self, Code};
use crate::sign::{self, TrustedKey, Upload};
use crate::spec::{Hook, Spec};
use crate::state::{State, now_ms};
use crate::view::Needs;

/// Modules at most.
const MODULES_CAP: usize = 64;
/// Largest module.
pub const MODULE_CAP_BYTES: usize = 64 << 20;

/// What an operator wants of middleware.
#[derive(Debug, Clone)]
pub struct PluginOptions {
    /// Where modules are kept over restarts.
    pub dir: Option<PathBuf>,
    /// Folders that uploads may name files of.
    pub upload_dirs: Vec<PathBuf>,
    /// Longest compilation.
    pub compile_timeout: Duration,
    /// Files and network that modules may be granted.
    pub grantable: Grantable,
    /// If there are some, only modules that one of them has signed are loaded.
    pub trusted: Vec<TrustedKey>,
}

/// The modules in the order that requests meet them.
pub type Chain = Arc<Vec<Arc<Module>>>;

/// The registry.
pub struct Plugins {
    chain: ArcSwap<Vec<Arc<Module>>>,
    changing: Mutex<()>,
    disk: Option<Disk>,
    options: PluginOptions,
    metrics: Arc<Metrics>,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unknown(uuid: Uuid) -> Error {
    Error::new(ErrorCode::NotFound, format!("module '{uuid}' does not exist; GET /wasm lists all"))
        .with_field("uuid")
}

fn taken(name: &str) -> Error {
    let message = format!("a module is named '{name}' already; replace it with PUT, or choose another name");
    Error::new(ErrorCode::Conflict, message).with_field("name")
}

impl Plugins {
    /// No modules yet.
    ///
    /// # Errors
    /// If the folder of `--wasm-dir` can't be used.
    pub fn new(options: PluginOptions, metrics: Arc<Metrics>) -> Result<Arc<Self>> {
        let disk = options.dir.as_deref().map(Disk::open).transpose()?;
        Ok(Arc::new(Self { chain: ArcSwap::default(), changing: Mutex::default(), disk, options, metrics }))
    }

    /// Loads what `--wasm-dir` holds.
    ///
    /// # Errors
    /// If a module of it can't be loaded: a gateway never starts with half its modules.
    pub async fn restore_all(&self) -> Result<()> {
        let _changing = self.changing.lock().await;
        let records = self.disk.as_ref().map(Disk::records).transpose()?.unwrap_or_default();
        let mut modules = Vec::new();
        for record in records {
            let name = record.spec.name.clone();
            let module = self.restore(record).await.map_err(|error| {
                let message = format!("module '{name}' of --wasm-dir can't be loaded: {}", error.message);
                Error::new(error.code, message)
            })?;
            tracing::info!(module = name, "module loaded from --wasm-dir");
            modules.push(module);
        }
        self.publish(modules);
        Ok(())
    }

    async fn restore(&self, mut record: Record) -> Result<Arc<Module>> {
        record.spec.check()?;
        record.spec.grants = self.options.grantable.allow(record.spec.grants)?;
        let disk = self.disk.as_ref().ok_or_else(|| Error::internal("no folder to restore from"))?;
        let bytes = disk.bytes(&record.sha256)?;
        if hex(&Sha256::digest(&bytes)) != record.sha256 {
            return Err(Error::internal("its bytes are damaged; upload it again"));
        }
        sign::check(&self.options.trusted, &bytes, record.signature.as_ref())?;
        let state = Arc::new(State::new(&record.spec.name, Arc::clone(&self.metrics)));
        self.load(record, bytes.into(), state).await
    }

    /// Compiles, tries and asks a module.
    async fn load(&self, record: Record, bytes: Arc<[u8]>, state: Arc<State>) -> Result<Arc<Module>> {
        let size = bytes.len();
        let known = self.chain().iter().find(|module| module.sha256() == record.sha256).cloned();
        let code = match known {
            Some(module) => Arc::clone(&module.code),
            None => {
                let folder = self.disk.as_ref().map(Disk::cache);
                Code::compile(bytes, record.sha256.clone(), folder, self.options.compile_timeout).await?
            }
        };
        if let Some(hook) = record.spec.hooks.iter().find(|hook| !code.has(**hook)) {
            let message = format!("the module does not export {}; take it out of `hooks`", hook.name());
            return Err(Error::invalid("hooks", message));
        }
        let first = Arc::new(Module::new(record, size, Needs::default(), code, state));
        let needs = runtime::describe(&first).await?;
        let (record, code, state) = (first.record.clone(), Arc::clone(&first.code), Arc::clone(&first.state));
        Ok(Arc::new(Module::new(record, size, needs, code, state)))
    }

    fn publish(&self, mut modules: Vec<Arc<Module>>) {
        modules.sort_by_key(|module| (module.spec.order, module.record.sequence));
        self.metrics.wasm_modules.with([""; 0]).set(i64::try_from(modules.len()).unwrap_or(i64::MAX));
        self.chain.store(Arc::new(modules));
    }

    /// The modules now.
    pub fn chain(&self) -> Chain {
        self.chain.load_full()
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.chain.load().is_empty()
    }

    /// Whether this build can run modules.
    pub fn can_run(&self) -> bool {
        runtime::PRESENT
    }

    /// A module.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn get(&self, uuid: Uuid) -> Result<Arc<Module>> {
        let chain = self.chain.load();
        chain.iter().find(|module| module.uuid() == uuid).cloned().ok_or_else(|| unknown(uuid))
    }

    /// The bytes of a file below one of the allowed folders.
    ///
    /// # Errors
    /// `PermissionDenied` outside of them, `NotFound` if there is no such file.
    pub async fn read_path(&self, path: &Path) -> Result<Vec<u8>> {
        let denied = || {
            let message =
                format!("{} is not below a folder of --wasm-upload-dirs; upload the bytes", path.display());
            Error::new(ErrorCode::PermissionDenied, message).with_field("path")
        };
        if self.options.upload_dirs.is_empty() {
            return Err(denied());
        }
        // Links and .. are followed first, so that neither leads out.
        let missing = |_| {
            let message = format!("{} does not exist or can't be read", path.display());
            Error::new(ErrorCode::NotFound, message).with_field("path")
        };
        let real = tokio::fs::canonicalize(path).await.map_err(missing)?;
        let mut allowed = false;
        for folder in &self.options.upload_dirs {
            let folder = tokio::fs::canonicalize(folder).await;
            allowed = allowed || folder.is_ok_and(|folder| real.starts_with(folder));
        }
        if !allowed {
            return Err(denied());
        }
        let data = tokio::fs::metadata(&real).await.map_err(missing)?;
        if !data.is_file() || data.len() > MODULE_CAP_BYTES as u64 {
            let message = format!("{} is no file of at most {MODULE_CAP_BYTES} bytes", path.display());
            return Err(Error::invalid("path", message));
        }
        tokio::fs::read(&real).await.map_err(missing)
    }

    /// Loads a module; the same bytes under the same name and settings are the module that is there already. Says
    /// whether it is new.
    ///
    /// # Errors
    /// What is wrong with the bytes or settings; `Conflict` if the name is taken.
    pub async fn add(&self, mut spec: Spec, upload: impl Into<Upload>) -> Result<(Arc<Module>, bool)> {
        let Upload { bytes, signature, origin } = upload.into();
        spec.check()?;
        spec.grants = self.options.grantable.allow(spec.grants)?;
        let bytes = limited(bytes)?;
        sign::check(&self.options.trusted, &bytes, signature.as_ref())?;
        let sha256 = hex(&Sha256::digest(&bytes));
        let changing = self.changing.lock().await;
        let chain = self.chain();
        if let Some(known) = chain.iter().find(|module| module.spec.name == spec.name) {
            return match known.sha256() == sha256 && known.spec == spec {
                true => Ok((Arc::clone(known), false)),
                false => Err(taken(&spec.name)),
            };
        }
        if chain.len() >= MODULES_CAP {
            let message = format!("{MODULES_CAP} modules are loaded; remove one first");
            return Err(Error::new(ErrorCode::ResourceExhausted, message));
        }
        let sequence = chain.iter().map(|module| module.record.sequence).max().unwrap_or(0) + 1;
        let now = now_ms();
        let state = Arc::new(State::new(&spec.name, Arc::clone(&self.metrics)));
        let record = Record {
            uuid: Uuid::now_v7(),
            spec,
            sha256,
            signature,
            origin,
            version: 1,
            created_ms: now,
            updated_ms: now,
            sequence,
        };
        let outcome = self.load(record, Arc::clone(&bytes), Arc::clone(&state)).await;
        let module = match outcome {
            Ok(module) => module,
            Err(error) => {
                state.forget_series();
                return Err(error);
            }
        };
        self.save(&module, Some(bytes)).await?;
        let mut modules = chain.to_vec();
        modules.push(Arc::clone(&module));
        self.publish(modules);
        drop(changing);
        tracing::info!(module = %module.spec.name, uuid = %module.uuid(), sha256 = module.sha256(), "module added");
        Ok((module, true))
    }

    async fn save(&self, module: &Module, bytes: Option<Arc<[u8]>>) -> Result<()> {
        let Some(disk) = self.disk.clone() else { return Ok(()) };
        let record = module.record.clone();
        let saved = tokio::task::spawn_blocking(move || disk.save(&record, bytes.as_deref())).await;
        saved.unwrap_or_else(|error| Err(Error::internal(format!("a module could not be kept: {error}"))))
    }

    /// Changes settings, bytes or both in one step: requests that have begun end on the old module.
    ///
    /// # Errors
    /// `NotFound`, or what is wrong with the changes; then the old one stays.
    pub async fn change(&self, uuid: Uuid, changes: &Value, upload: Option<Upload>) -> Result<Arc<Module>> {
        let changing = self.changing.lock().await;
        let old = self.get(uuid)?;
        let mut spec = old.spec.patched(changes)?;
        spec.grants = self.options.grantable.allow(spec.grants)?;
        if spec.name != old.spec.name {
            let message =
                format!("`name` is '{}' for good; load another module for another name", old.spec.name);
            return Err(Error::invalid("name", message));
        }
        let mut record =
            Record { spec, updated_ms: now_ms(), version: old.record.version + 1, ..old.record.clone() };
        let state = Arc::clone(&old.state);
        let (module, bytes) = match upload {
            Some(Upload { bytes, signature, origin }) => {
                let bytes = limited(bytes)?;
                sign::check(&self.options.trusted, &bytes, signature.as_ref())?;
                (record.signature, record.origin) = (signature, origin);
                record.sha256 = hex(&Sha256::digest(&bytes));
                (self.load(record, Arc::clone(&bytes), state).await?, Some(bytes))
            }
            None => {
                if let Some(hook) = record.spec.hooks.iter().find(|hook| !old.code.has(**hook)) {
                    let message =
                        format!("the module does not export {}; take it out of `hooks`", hook.name());
                    return Err(Error::invalid("hooks", message));
                }
                let module = Module::new(record, old.size, old.needs.clone(), Arc::clone(&old.code), state);
                (Arc::new(module), None)
            }
        };
        self.save(&module, bytes).await?;
        // New bytes, or an operator's look at it, are a new chance.
        module.state.release();
        let chain = self.chain();
        let modules = chain.iter().map(|known| match known.uuid() == uuid {
            true => Arc::clone(&module),
            false => Arc::clone(known),
        });
        self.publish(modules.collect());
        self.sweep(&changing).await;
        tracing::info!(module = %module.spec.name, version = module.record.version, "module changed");
        Ok(module)
    }

    /// Takes a module out; requests that have begun end with it.
    ///
    /// # Errors
    /// `NotFound`.
    pub async fn remove(&self, uuid: Uuid) -> Result<Arc<Module>> {
        let changing = self.changing.lock().await;
        let module = self.get(uuid)?;
        if let Some(disk) = &self.disk {
            disk.remove(uuid)?;
        }
        self.publish(self.chain().iter().filter(|known| known.uuid() != uuid).cloned().collect());
        module.state.forget_series();
        self.sweep(&changing).await;
        tracing::info!(module = %module.spec.name, "module removed");
        Ok(module)
    }

    /// Deletes files that no module uses; only while nothing else changes.
    async fn sweep(&self, _changing: &MutexGuard<'_, ()>) {
        let Some(disk) = self.disk.clone() else { return };
        let chain = self.chain();
        let swept = tokio::task::spawn_blocking(move || {
            disk.sweep(&chain.iter().map(|module| module.sha256()).collect::<Vec<_>>());
        });
        // Files that stay only take room.
        drop(swept.await);
    }

    /// The list of `GET /wasm`.
    pub fn describe(&self) -> Value {
        let chain = self.chain();
        let sum = |of: fn(&State) -> u64| chain.iter().map(|module| of(&module.state)).sum::<u64>();
        let calls = sum(|state| state.counts.calls.load(Ordering::Relaxed));
        let failures = sum(|state| state.counts.failures.load(Ordering::Relaxed));
        let micros = sum(|state| state.counts.micros.load(Ordering::Relaxed));
        let slowest =
            chain.iter().map(|module| module.state.counts.slowest_micros.load(Ordering::Relaxed)).max();
        json!({
            "modules": chain.iter().map(|module| module.describe()).collect::<Vec<_>>(),
            "metrics": {
                "total_executions": calls,
                "successful_executions": calls - failures.min(calls),
                "failed_executions": failures,
                "total_execution_time_ms": micros / 1000,
                "max_execution_time_ms": slowest.unwrap_or(0) / 1000,
                "average_execution_time_ms": micros as f64 / 1000.0 / calls.max(1) as f64,
            },
            "runtime": runtime::PRESENT,
            "hooks": Hook::ALL.map(Hook::name),
        })
    }
}

fn limited(bytes: Vec<u8>) -> Result<Arc<[u8]>> {
    if bytes.len() > MODULE_CAP_BYTES {
        let message = format!("the module is over {MODULE_CAP_BYTES} bytes; build a smaller one");
        return Err(Error::new(ErrorCode::PayloadTooLarge, message));
    }
    Ok(bytes.into())
}
