//! Calls: a fresh instance each (one a stream), its limits, and what went wrong under its name.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use branchline_core::{Error, Result};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use wasmtime::component::{ComponentNamedList, Lift, Lower, TypedFunc};
use wasmtime::{Store, Trap};

use super::code::{Code, World};
use super::guest::Guest;
use super::{Runtime, smg};
use crate::failure::{Called, Cause, Cost, Failure};
use crate::module::Module;
use crate::spec::Hook;
use crate::view::{
    EventAction, EventView, FailureView, Needs, RequestAction, RequestView, ResponseAction, ResponseView,
    RouteAction, RouteView,
};

type Outcome<R> = (std::result::Result<R, Failure>, Cost);

/// A place among the calls of its module and of the process.
struct Place {
    _module: OwnedSemaphorePermit,
    _process: OwnedSemaphorePermit,
}

async fn place(own: &Arc<Semaphore>, process: &Arc<Semaphore>) -> std::result::Result<Place, Failure> {
    let closed = |_| Failure::new(Cause::Busy, "the runtime stops");
    let module = Arc::clone(own).acquire_owned().await.map_err(closed)?;
    let process = Arc::clone(process).acquire_owned().await.map_err(closed)?;
    Ok(Place { _module: module, _process: process })
}

fn store(runtime: &Runtime, module: &Module) -> Store<Guest> {
    let limits = &module.spec.limits;
    let memory = (limits.memory_mib as usize) << 20;
    let guest = Guest::new(module, memory);
    let mut store = Store::new(&runtime.engine, guest);
    store.limiter(|guest| &mut guest.bounds);
    store.set_epoch_deadline(2);
    store.epoch_deadline_async_yield_and_update(1);
    // What the host copies out of a guest in one call; lists that overlap can name far more than a guest holds.
    store.set_hostcall_fuel((limits.output_kib as usize) << 10);
    store
}

/// Gives the store its fuel for one call; how much that is.
fn refuel(store: &mut Store<Guest>, module: &Module) -> u64 {
    let fuel = match module.spec.limits.fuel {
        0 => u64::MAX,
        fuel => fuel,
    };
    // Fuel is on in the engine's configuration, so that it can always be set.
    drop(store.set_fuel(fuel));
    fuel
}

fn failure(error: &wasmtime::Error, store: &Store<Guest>) -> Failure {
    if let Some(what) = store.data().bounds.hit {
        return Failure::new(Cause::Limit, format!("it wanted more {what} than it may have"));
    }
    let cause = match error.downcast_ref::<Trap>() {
        Some(Trap::OutOfFuel) => Cause::Fuel,
        Some(Trap::Interrupt) => Cause::Timeout,
        Some(_) => Cause::Trap,
        None if error.is::<wasmtime::WasmBacktrace>() => Cause::Trap,
        None => Cause::BadOutput,
    };
    let text: String = format!("{error:#}").chars().take(600).collect();
    Failure::new(cause, text)
}

fn full(error: &wasmtime::Error, store: &Store<Guest>) -> Failure {
    match error.is::<wasmtime::PoolConcurrencyLimitError>() {
        true => Failure::new(Cause::Busy, "no place for an instance is free"),
        false => failure(error, store),
    }
}

/// Instantiates and calls once.
async fn once<P, R>(module: &Module, index: &Index, params: P) -> Outcome<R>
where
    P: ComponentNamedList + Lower + Send + Sync + 'static,
    R: Lift + Send + Sync + 'static,
{
    let runtime = match Runtime::get() {
        Ok(runtime) => runtime,
        Err(error) => return (Err(Failure::new(Cause::Busy, error.message)), Cost::default()),
    };
    let mut store = store(runtime, module);
    let fuel = refuel(&mut store, module);
    let result = async {
        let instance = match module.code.pre.instantiate_async(&mut store).await {
            Ok(instance) => instance,
            Err(error) => return Err(full(&error, &store)),
        };
        let function = index.of(&module.code);
        let function: TypedFunc<P, (R,)> = match function {
            Some(at) => instance.get_typed_func(&mut store, at),
            None => Err(wasmtime::Error::msg("the hook is gone")),
        }
        .map_err(|error| Failure::new(Cause::BadOutput, format!("{error:#}")))?;
        match function.call_async(&mut store, params).await {
            Ok((answer,)) => Ok(answer),
            Err(error) => Err(failure(&error, &store)),
        }
    }
    .await;
    (result, cost(&store, fuel))
}

fn cost(store: &Store<Guest>, fuel: u64) -> Cost {
    let used = fuel.saturating_sub(store.get_fuel().unwrap_or(fuel));
    Cost { micros: 0, fuel: used, memory_bytes: store.data().bounds.peak as u64 }
}

/// Which function of a module.
#[derive(Clone, Copy)]
enum Index {
    Hook(Hook),
    About,
}

impl Index {
    fn of(self, code: &Code) -> Option<&wasmtime::component::ComponentExportIndex> {
        match self {
            Self::Hook(hook) => code.hook(hook),
            Self::About => code.about.as_ref(),
        }
    }
}

/// Runs work that hands back an outcome, within the module's time.
async fn timed<R: Send + 'static, F>(
    module: &Arc<Module>,
    make: impl FnOnce(Arc<AtomicBool>) -> F,
    lost: impl FnOnce(Failure) -> R,
) -> (R, u64)
where
    F: Future<Output = R> + Send + 'static,
{
    let started = Instant::now();
    let limit = Duration::from_millis(module.spec.limits.time_ms);
    let entered = Arc::new(AtomicBool::new(false));
    let work: Pin<Box<dyn Future<Output = R> + Send>> = Box::pin(make(Arc::clone(&entered)));
    let driven = match Runtime::get() {
        Ok(runtime) => runtime.drive(work, limit).await,
        Err(error) => Some(Err(error.message)),
    };
    let micros = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
    let done = match driven {
        Some(Ok(done)) => done,
        Some(Err(panic)) => lost(Failure::new(Cause::Trap, panic)),
        None if entered.load(Ordering::Acquire) => {
            lost(Failure::new(Cause::Timeout, format!("it took longer than {limit:?}")))
        }
        None => lost(Failure::new(Cause::Busy, format!("no place for it was free within {limit:?}"))),
    };
    (done, micros)
}

async fn call<P, R>(module: &Arc<Module>, index: Index, params: P) -> Called<R>
where
    P: ComponentNamedList + Lower + Send + Sync + 'static,
    R: Lift + Send + Sync + 'static,
{
    let owner = Arc::clone(module);
    let work = |entered: Arc<AtomicBool>| async move {
        let calls = match Runtime::get() {
            Ok(runtime) => &runtime.calls,
            Err(error) => return (Err(Failure::new(Cause::Busy, error.message)), Cost::default()),
        };
        let _place = match place(&owner.places, calls).await {
            Ok(place) => place,
            Err(failure) => return (Err(failure), Cost::default()),
        };
        entered.store(true, Ordering::Release);
        once(&owner, &index, params).await
    };
    let ((result, cost), micros) = timed(module, work, |failure| (Err(failure), Cost::default())).await;
    Called { result, cost: Cost { micros, ..cost } }
}

fn mapped<A, B: From<A>>(called: Called<A>) -> Called<B> {
    Called { result: called.result.map(B::from), cost: called.cost }
}

/// Calls on-request.
pub(crate) async fn on_request(module: &Arc<Module>, view: RequestView) -> Called<RequestAction> {
    let index = Index::Hook(Hook::OnRequest);
    match module.code.world {
        World::Own => call(module, index, (view,)).await,
        World::Smg => mapped(call::<_, smg::Action>(module, index, (smg::Request::from(view),)).await),
    }
}

/// Calls on-response.
pub(crate) async fn on_response(
    module: &Arc<Module>,
    request: RequestView,
    view: ResponseView,
) -> Called<ResponseAction> {
    let index = Index::Hook(Hook::OnResponse);
    match module.code.world {
        World::Own => call(module, index, (request, view)).await,
        World::Smg => mapped(call::<_, smg::Action>(module, index, (smg::Response::from(view),)).await),
    }
}

/// Calls on-error.
pub(crate) async fn on_error(
    module: &Arc<Module>,
    request: RequestView,
    view: FailureView,
) -> Called<ResponseAction> {
    call(module, Index::Hook(Hook::OnError), (request, view)).await
}

/// Calls on-route.
pub(crate) async fn on_route(module: &Arc<Module>, view: RouteView) -> Called<RouteAction> {
    call(module, Index::Hook(Hook::OnRoute), (view,)).await
}

type OnEvent = TypedFunc<(Arc<RequestView>, EventView), (EventAction,)>;

/// A stream's own instance.
struct Live {
    store: Store<Guest>,
    function: OnEvent,
    _place: Place,
}

/// The events of one stream before one module: all reach the same instance.
pub(crate) struct Stream {
    module: Arc<Module>,
    live: Option<Live>,
}

impl Stream {
    pub(crate) fn new(module: Arc<Module>) -> Self {
        Self { module, live: None }
    }

    async fn begin(module: &Module) -> std::result::Result<Live, Failure> {
        let runtime = Runtime::get().map_err(|error| Failure::new(Cause::Busy, error.message))?;
        let place = place(&module.streams, &runtime.streams).await?;
        let mut store = store(runtime, module);
        refuel(&mut store, module);
        let instance = match module.code.pre.instantiate_async(&mut store).await {
            Ok(instance) => instance,
            Err(error) => return Err(full(&error, &store)),
        };
        let Some(at) = module.code.hook(Hook::OnStreamEvent) else {
            return Err(Failure::new(Cause::BadOutput, "the hook is gone"));
        };
        let function = instance
            .get_typed_func(&mut store, at)
            .map_err(|error| Failure::new(Cause::BadOutput, format!("{error:#}")))?;
        Ok(Live { store, function, _place: place })
    }

    /// Calls on-stream-event. After a failure the next event meets a new instance.
    pub(crate) async fn event(&mut self, request: Arc<RequestView>, event: EventView) -> Called<EventAction> {
        type Done = (Option<Live>, Outcome<EventAction>);
        let module = Arc::clone(&self.module);
        let live = self.live.take();
        let work = |entered: Arc<AtomicBool>| async move {
            let live = match live {
                Some(live) => Ok(live),
                None => Self::begin(&module).await,
            };
            entered.store(true, Ordering::Release);
            let mut live = match live {
                Ok(live) => live,
                Err(failure) => return (None, (Err(failure), Cost::default())),
            };
            let fuel = refuel(&mut live.store, &module);
            // Between events the clock has gone on.
            live.store.set_epoch_deadline(2);
            match live.function.call_async(&mut live.store, (request, event)).await {
                Ok((action,)) => {
                    let cost = cost(&live.store, fuel);
                    live.store.data_mut().lines = 0;
                    (Some(live), (Ok(action), cost))
                }
                Err(error) => {
                    let outcome = (Err(failure(&error, &live.store)), cost(&live.store, fuel));
                    (None, outcome)
                }
            }
        };
        let lost = |failure| -> Done { (None, (Err(failure), Cost::default())) };
        let ((live, (result, cost)), micros) = timed(&self.module, work, lost).await;
        self.live = live;
        Called { result, cost: Cost { micros, ..cost } }
    }
}

/// Asks a freshly loaded module for its needs and tries the types of its hooks.
pub(crate) async fn describe(module: &Arc<Module>) -> Result<Needs> {
    check_types(module).await?;
    if module.code.world == World::Smg {
        // Its world can't say; its hooks always take a body.
        return Ok(Needs { request_body: true, response_body: true });
    }
    if module.code.about.is_none() {
        return Ok(Needs::default());
    }
    let called: Called<Needs> = call(module, Index::About, ()).await;
    called.result.map_err(|failure| {
        let message = format!("the module's describe failed ({}): {}", failure.cause.name(), failure.detail);
        Error::invalid("module", message)
    })
}

async fn check_types(module: &Arc<Module>) -> Result<()> {
    let owner = Arc::clone(module);
    let work = |entered: Arc<AtomicBool>| async move {
        entered.store(true, Ordering::Release);
        types_of(&owner).await
    };
    timed(module, work, Err).await.0.map_err(|failure| {
        let message = format!("the module can't be used ({}): {}", failure.cause.name(), failure.detail);
        Error::invalid("module", message)
    })
}

async fn types_of(module: &Module) -> std::result::Result<(), Failure> {
    let runtime = Runtime::get().map_err(|error| Failure::new(Cause::Busy, error.message))?;
    let mut store = store(runtime, module);
    refuel(&mut store, module);
    let instance = match module.code.pre.instantiate_async(&mut store).await {
        Ok(instance) => instance,
        Err(error) => return Err(full(&error, &store)),
    };
    let wrong = |hook: &'static str| {
        move |error: wasmtime::Error| {
            Failure::new(Cause::BadOutput, format!("{hook} has other types: {error:#}"))
        }
    };
    macro_rules! check {
        ($hook:expr, $params:ty, $answer:ty) => {
            if let Some(at) = module.code.hook($hook) {
                let typed = instance.get_typed_func::<$params, ($answer,)>(&mut store, at);
                typed.map_err(wrong($hook.name()))?;
            }
        };
    }
    if module.code.world == World::Smg {
        check!(Hook::OnRequest, (smg::Request,), smg::Action);
        check!(Hook::OnResponse, (smg::Response,), smg::Action);
        return Ok(());
    }
    check!(Hook::OnRequest, (RequestView,), RequestAction);
    check!(Hook::OnResponse, (RequestView, ResponseView), ResponseAction);
    check!(Hook::OnStreamEvent, (Arc<RequestView>, EventView), EventAction);
    check!(Hook::OnError, (RequestView, FailureView), ResponseAction);
    check!(Hook::OnRoute, (RouteView,), RouteAction);
    Ok(())
}
