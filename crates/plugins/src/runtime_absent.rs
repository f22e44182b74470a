//! The place of the runtime in builds without it: nothing can be loaded, so nothing is ever called.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use branchline_core::{Error, ErrorCode, Result};

use crate::failure::{Called, Cause, Cost, Failure};
use crate::module::Module;
use crate::spec::Hook;
use crate::view::{
    EventAction, EventView, FailureView, Needs, RequestAction, RequestView, ResponseAction, ResponseView,
    RouteAction, RouteView,
};

/// Whether this build can run modules.
pub(crate) const PRESENT: bool = false;

/// Never made.
pub(crate) enum Code {}

/// What a module's attempt to load is answered.
pub(crate) fn absent() -> Error {
    let message = "this build has no WebAssembly runtime; use the wheel, or build with --features wasm";
    Error::new(ErrorCode::Unimplemented, message)
}

impl Code {
    pub(crate) fn has(&self, _hook: Hook) -> bool {
        match *self {}
    }

    pub(crate) fn skips_streams(&self) -> bool {
        match *self {}
    }

    pub(crate) async fn compile(
        _bytes: Arc<[u8]>,
        _sha256: String,
        _folder: Option<Arc<Path>>,
        _limit: Duration,
    ) -> Result<Arc<Self>> {
        Err(absent())
    }
}

fn never<A>() -> Called<A> {
    Called { result: Err(Failure::new(Cause::Busy, "no runtime")), cost: Cost::default() }
}

pub(crate) async fn describe(_module: &Arc<Module>) -> Result<Needs> {
    Err(absent())
}

pub(crate) async fn on_request(_module: &Arc<Module>, _view: RequestView) -> Called<RequestAction> {
    never()
}

pub(crate) async fn on_response(
    _module: &Arc<Module>,
    _request: RequestView,
    _view: ResponseView,
) -> Called<ResponseAction> {
    never()
}

pub(crate) async fn on_error(
    _module: &Arc<Module>,
    _request: RequestView,
    _view: FailureView,
) -> Called<ResponseAction> {
    never()
}

pub(crate) async fn on_route(_module: &Arc<Module>, _view: RouteView) -> Called<RouteAction> {
    never()
}

/// Never used.
pub(crate) struct Stream;

impl Stream {
    pub(crate) fn new(_module: Arc<Module>) -> Self {
        Self
    }

    pub(crate) async fn event(
        &mut self,
        _request: Arc<RequestView>,
        _event: EventView,
    ) -> Called<EventAction> {
        never()
    }
}
