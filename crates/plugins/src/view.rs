//! The values of `wit/branchline/middleware.wit` in Rust: what hooks see and what they answer.
//!
//! With the `runtime` feature they cross into a guest as they are; their order and names are the WIT's.

#[cfg(feature = "runtime")]
use wasmtime::component::{ComponentType, Lift, Lower};

macro_rules! record {
    ($(#[$meta:meta])* $way:ident $name:ident { $( $(#[$doc:meta])* $field:ident = $wit:literal : $type:ty, )* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
        #[cfg_attr(feature = "runtime", derive(ComponentType, $way), component(record))]
        pub struct $name {
            $( $(#[$doc])* #[cfg_attr(feature = "runtime", component(name = $wit))] pub $field: $type, )*
        }
    };
}

/// One header.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "runtime", derive(ComponentType, Lift, Lower), component(record))]
pub struct Header {
    /// Lower case in what modules see.
    pub name: String,
    /// UTF-8.
    pub value: String,
}

impl Header {
    /// A header.
    pub fn new(name: &str, value: &str) -> Self {
        Self { name: name.to_owned(), value: value.to_owned() }
    }
}

record! {
    /// What is known of a request.
    Lower RequestView {
        /// Unique in this gateway.
        id = "id": String,
        /// Upper case.
        method = "method": String,
        /// Without the query.
        path = "path": String,
        /// Without the question mark.
        query = "query": String,
        /// Without secret ones, unless granted.
        headers = "headers": Vec<Header>,
        /// As the body names it; only if the body was read.
        model = "model": Option<String>,
        /// The header x-tenant-id.
        tenant = "tenant": Option<String>,
        /// Only for modules that ask for it.
        body = "body": Option<Vec<u8>>,
    }
}

record! {
    /// Changes of headers: removed first, then set, then added.
    Lift HeaderChanges {
        /// Replace all of the name.
        set = "set": Vec<Header>,
        /// Stand beside those of the name.
        add = "add": Vec<Header>,
        /// Names to drop.
        remove = "remove": Vec<String>,
    }
}

record! {
    /// Changes of a request.
    Lift RequestChanges {
        /// New method.
        method = "method": Option<String>,
        /// New path.
        path = "path": Option<String>,
        /// New query.
        query = "query": Option<String>,
        /// Headers.
        headers = "headers": HeaderChanges,
        /// New body.
        body = "body": Option<Vec<u8>>,
    }
}

record! {
    /// An answer made by a module.
    Lift Reply {
        /// 100 is not possible; 200 to 599.
        status = "status": u16,
        /// Its headers.
        headers = "headers": Vec<Header>,
        /// Its body.
        body = "body": Vec<u8>,
    }
}

record! {
    /// A worker's answer.
    Lower ResponseView {
        /// HTTP status.
        status = "status": u16,
        /// Without secret ones, unless granted.
        headers = "headers": Vec<Header>,
        /// An event stream: then there is no body here.
        streaming = "streaming": bool,
        /// Only for modules that ask for it.
        body = "body": Option<Vec<u8>>,
    }
}

record! {
    /// Changes of an answer.
    Lift ResponseChanges {
        /// New status.
        status = "status": Option<u16>,
        /// Headers.
        headers = "headers": HeaderChanges,
        /// New body.
        body = "body": Option<Vec<u8>>,
    }
}

record! {
    /// One whole event of a stream.
    Lower EventView {
        /// The event field.
        name = "name": Option<String>,
        /// The data lines, joined by line ends.
        data = "data": String,
        /// 0 for the first.
        index = "index": u64,
    }
}

record! {
    /// An event made by a module.
    Lift NewEvent {
        /// The event field.
        name = "name": Option<String>,
        /// Its data; line ends make several data lines.
        data = "data": String,
    }
}

record! {
    /// An answer of status 400 or more.
    Lower FailureView {
        /// HTTP status.
        status = "status": u16,
        /// The gateway's code; empty if a worker answered.
        code = "code": String,
        /// Without secret ones, unless granted.
        headers = "headers": Vec<Header>,
        /// Only for modules that ask for response bodies.
        body = "body": Option<Vec<u8>>,
    }
}

record! {
    /// A label of a worker.
    Lower LabelView {
        /// Its name.
        key = "key": String,
        /// Its value.
        value = "value": String,
    }
}

record! {
    /// A worker that could serve a request.
    Lower CandidateView {
        /// As in GET /workers.
        id = "id": String,
        /// Its address.
        url = "url": String,
        /// What is known of it.
        labels = "labels": Vec<LabelView>,
        /// Requests it serves now.
        running = "running": u64,
        /// Prompt tokens that wait there.
        queued_tokens = "queued-tokens": u64,
        /// Prompt tokens that it is predicted to have.
        cached_tokens = "cached-tokens": u64,
    }
}

record! {
    /// A choice to make.
    Lower RouteView {
        /// The request's id.
        request_id = "request-id": String,
        /// The model it names.
        model = "model": Option<String>,
        /// The header x-tenant-id.
        tenant = "tenant": Option<String>,
        /// Length of the prompt; estimated where nothing tokenises.
        prompt_tokens = "prompt-tokens": u64,
        /// Who could serve it.
        candidates = "candidates": Vec<CandidateView>,
    }
}

record! {
    /// A candidate's share.
    Lift Weight {
        /// The candidate.
        id = "id": String,
        /// Its share; 0 or more.
        weight = "weight": f64,
    }
}

record! {
    /// What a module needs.
    Lift Needs {
        /// Requests wait for their body.
        request_body = "request-body": bool,
        /// Answers that are no event streams wait for their body.
        response_body = "response-body": bool,
    }
}

macro_rules! action {
    ($(#[$meta:meta])* $name:ident { $( $(#[$doc:meta])* $case:ident = $wit:literal $(($type:ty))?, )* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, serde::Serialize)]
        #[serde(rename_all = "kebab-case")]
        #[cfg_attr(feature = "runtime", derive(ComponentType, Lift), component(variant))]
        pub enum $name {
            $( $(#[$doc])* #[cfg_attr(feature = "runtime", component(name = $wit))] $case $(($type))?, )*
        }
    };
}

action! {
    /// Answer of on-request.
    RequestAction {
        /// Leave it as it is.
        Continue = "continue",
        /// Change it.
        Modify = "modify"(RequestChanges),
        /// Answer instead of a worker.
        Reject = "reject"(Reply),
    }
}

action! {
    /// Answer of on-response and on-error.
    ResponseAction {
        /// Leave it as it is.
        Continue = "continue",
        /// Change it.
        Modify = "modify"(ResponseChanges),
        /// Answer this instead.
        Reject = "reject"(Reply),
    }
}

action! {
    /// Answer of on-stream-event.
    EventAction {
        /// Leave it as it is.
        Continue = "continue",
        /// These instead.
        Replace = "replace"(Vec<NewEvent>),
        /// These, then the end.
        Stop = "stop"(Vec<NewEvent>),
    }
}

action! {
    /// Answer of on-route.
    RouteAction {
        /// The policy chooses.
        Continue = "continue",
        /// The policy chooses among these.
        Filter = "filter"(Vec<String>),
        /// Drawn by weight.
        Weigh = "weigh"(Vec<Weight>),
        /// This one.
        Pick = "pick"(String),
    }
}
