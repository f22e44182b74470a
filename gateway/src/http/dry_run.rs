//! A module tried on a sample: the action and its cost, with no trace in store, metrics or quarantine.

use std::sync::Arc;

use branchline_core::{Error, Result};
use branchline_plugins::{
    Called, EventView, Events, FailureView, Hook, Module, RequestView, ResponseView, RouteView,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

/// Calls the hook of the sample. `module` is a twin, made for this; what it logged is shown from after that line.
pub(crate) async fn run(module: &Arc<Module>, sample: &[u8], after: u64) -> Result<Value> {
    let mut sample: Map<String, Value> = serde_json::from_slice(sample).map_err(|error| {
        Error::invalid("body", format!("the sample is no JSON object ({error}); send one"))
    })?;
    let hook = match sample.remove("hook") {
        None => Hook::ALL.into_iter().find(|hook| module.wants(*hook)),
        Some(name) => name.as_str().and_then(Hook::parse),
    };
    let Some(hook) = hook.filter(|hook| module.wants(*hook)) else {
        let names: Vec<_> =
            Hook::ALL.into_iter().filter(|hook| module.wants(*hook)).map(Hook::name).collect();
        let message = format!("`hook` is none that the module has; use one of: {}", names.join(", "));
        return Err(Error::invalid("hook", message));
    };
    let request: RequestView = take(&mut sample, "request")?;
    let outcome = match hook {
        Hook::OnRequest => shown(module.on_request(request).await),
        Hook::OnResponse => {
            let response: ResponseView = take(&mut sample, "response")?;
            shown(module.on_response(request, response).await)
        }
        Hook::OnError => {
            let failure: FailureView = take(&mut sample, "failure")?;
            shown(module.on_error(request, failure).await)
        }
        Hook::OnRoute => {
            let route: RouteView = take(&mut sample, "route")?;
            shown(module.on_route(route).await)
        }
        Hook::OnStreamEvent => {
            let events: Vec<EventView> = match sample.remove("events") {
                Some(events) => read("events", events)?,
                None => vec![take(&mut sample, "event")?],
            };
            let (mut stream, request) = (Events::new(Arc::clone(module)), Arc::new(request));
            let mut all = Vec::new();
            for event in events {
                all.push(shown(stream.event(&request, event.name, event.data).await));
            }
            json!({"events": all})
        }
    };
    if let Some(unknown) = sample.keys().next() {
        return Err(Error::invalid(
            unknown.as_str(),
            format!("`{unknown}` is nothing that {} takes", hook.name()),
        ));
    }
    Ok(json!({"hook": hook.name(), "outcome": outcome, "log": module.lines(after)}))
}

fn shown<A: Serialize>(called: Called<A>) -> Value {
    let mut value = match called.result {
        Ok(action) => json!({"action": action, "cost": called.cost}),
        Err(failure) => {
            json!({"failure": {"cause": failure.cause.name(), "detail": failure.detail}, "cost": called.cost})
        }
    };
    show_bodies(&mut value);
    value
}

/// Bytes as text where they are text.
fn show_bodies(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let bytes =
                    (name == "body").then(|| serde_json::from_value::<Vec<u8>>(value.clone()).ok()).flatten();
                match bytes.map(String::from_utf8) {
                    Some(Ok(text)) => *value = Value::String(text),
                    _ => show_bodies(value),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(show_bodies),
        _ => {}
    }
}

fn take<T: DeserializeOwned>(sample: &mut Map<String, Value>, field: &str) -> Result<T> {
    read(field, sample.remove(field).unwrap_or_else(|| json!({})))
}

/// Bodies may be given as text.
fn read<T: DeserializeOwned>(field: &str, mut value: Value) -> Result<T> {
    if let Some(body) = value.get_mut("body")
        && let Some(text) = body.as_str()
    {
        *body = json!(text.as_bytes());
    }
    serde_json::from_value(value)
        .map_err(|error| Error::invalid(field, format!("`{field}` of the sample can't be read: {error}")))
}
