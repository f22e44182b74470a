//! The routes that metrics may name and how each may be reached. Any path outside this list is `other`.

/// Who may call a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Anybody: probes and the page's files, which carry no secret.
    Open,
    /// Holders of a key, if keys are set.
    Client,
    /// As `Client`, and not from web pages of other sites or rebound names.
    Admin,
}

/// A route as metrics show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// Its template: the `route` label.
    pub label: &'static str,
    /// Who may call it.
    pub access: Access,
}

impl Route {
    /// Whether a POST to it is work that takes a place. What ends work must not wait for one.
    pub fn is_work(self) -> bool {
        self.access == Access::Client && self != RESPONSE
    }
}

const ROUTES: &[Route] = &[
    route("/v1/chat/completions", Access::Client),
    route("/v1/completions", Access::Client),
    route("/v1/models", Access::Client),
    route("/generate", Access::Client),
    route("/v1/leases", Access::Client),
    route("/v1/score", Access::Client),
    route("/v1/tokenize", Access::Client),
    route("/v1/detokenize", Access::Client),
    route("/tokenize", Access::Client),
    route("/detokenize", Access::Client),
    route("/v1/embeddings", Access::Client),
    route("/embeddings", Access::Client),
    route("/v1/responses", Access::Client),
    route("/v1/messages", Access::Client),
    route("/v1/messages/count_tokens", Access::Client),
    route("/v1/rerank", Access::Client),
    route("/rerank", Access::Client),
    route("/v2/rerank", Access::Client),
    route("/score", Access::Client),
    route("/classify", Access::Client),
    route("/v1/classify", Access::Client),
    route("/", Access::Open),
    route("/page/about", Access::Open),
    route("/health", Access::Open),
    route("/health_generate", Access::Open),
    route("/readiness", Access::Open),
    route("/liveness", Access::Open),
    route("/metrics", Access::Admin),
    route("/server_info", Access::Admin),
    route("/get_server_info", Access::Admin),
    route("/get_model_info", Access::Admin),
    route("/flush_cache", Access::Admin),
    route("/cache/tree", Access::Admin),
    route("/explain", Access::Admin),
    route("/abort_request", Access::Admin),
    route("/workers", Access::Admin),
    route("/add_worker", Access::Admin),
    route("/remove_worker", Access::Admin),
    route("/list_workers", Access::Admin),
    route("/wasm", Access::Admin),
    route("/load_lora_adapter", Access::Admin),
    route("/unload_lora_adapter", Access::Admin),
    route("/v1/load_lora_adapter", Access::Admin),
    route("/v1/unload_lora_adapter", Access::Admin),
];

const WORKER: Route = route("/workers/{id}", Access::Admin);
const EXPLAIN: Route = route("/explain/{request}", Access::Admin);
const ASSET: Route = route("/page/{file}", Access::Open);
const MODULE: Route = route("/wasm/{uuid}", Access::Admin);
const MODEL: Route = route("/v1/models/{id}", Access::Client);
const LEASE: Route = route("/v1/leases/{id}", Access::Client);
const RESPONSE: Route = route("/v1/responses/{id}", Access::Client);
const OTHER: Route = route("other", Access::Client);

const fn route(label: &'static str, access: Access) -> Route {
    Route { label, access }
}

/// The route of a request's path.
pub fn route_of(path: &str) -> Route {
    match ROUTES.iter().find(|route| route.label == path) {
        Some(route) => *route,
        None if path.starts_with("/workers/") => WORKER,
        None if path.starts_with("/explain/") => EXPLAIN,
        None if path.starts_with("/wasm/") => MODULE,
        None if path.starts_with("/page/") => ASSET,
        None if path.starts_with("/v1/models/") => MODEL,
        None if path.starts_with("/v1/leases/") => LEASE,
        None if path.starts_with("/v1/responses/") => RESPONSE,
        None => OTHER,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_clients_never_become_labels() {
        assert_eq!(route_of("/v1/models").label, "/v1/models");
        for path in ["/embeddings", "/classify", "/v1/classify", "/v1/score"] {
            assert_eq!(ROUTES.iter().filter(|route| route.label == path).count(), 1, "{path}");
        }
        assert_eq!(route_of("/workers/w7").label, "/workers/{id}");
        assert_eq!(route_of("/v1/leases/lease.a.b.c/renew").label, "/v1/leases/{id}");
        assert_eq!(route_of("/v1/models/org/name").label, "/v1/models/{id}");
        assert_eq!((route_of("/").label, route_of("/page/x").label), ("/", "/page/{file}"));
        for path in ["/v1/model", "//", "", "/v1/models?x", "/%00", "/page"] {
            assert_eq!(route_of(path).label, "other", "{path}");
        }
    }
}
