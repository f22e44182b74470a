//! Names the tenant of a request by its API key: x-tenant-id. Config: {"KEY": "tenant", …}; needs `grants.secrets`.

wit_bindgen::generate!({ path: "wit", world: "request-filter" });

use branchline::middleware::host;
use exports::branchline::middleware::on_request::{Guest, Request, RequestAction};

use branchline::middleware::types::{Header, HeaderChanges, Reply, RequestChanges};

struct Module;

fn key(request: &Request) -> Option<&str> {
    let find = |name: &str| request.headers.iter().find(|header| header.name == name).map(|header| header.value.as_str());
    find("x-api-key").or_else(|| find("authorization")?.strip_prefix("Bearer "))
}

impl Guest for Module {
    fn handle(request: Request) -> RequestAction {
        let tenants: serde_json::Value = serde_json::from_str(&host::config()).unwrap_or_default();
        let tenant = key(&request).and_then(|key| tenants.get(key)?.as_str());
        let Some(tenant) = tenant else {
            let body = br#"{"error":{"message":"the API key is nobody's","type":"authentication_error"}}"#.to_vec();
            let headers = vec![Header { name: "content-type".to_owned(), value: "application/json".to_owned() }];
            return RequestAction::Reject(Reply { status: 401, headers, body });
        };
        let set = vec![Header { name: "x-tenant-id".to_owned(), value: tenant.to_owned() }];
        let headers = HeaderChanges { set, add: vec![], remove: vec![] };
        RequestAction::Modify(RequestChanges { method: None, path: None, query: None, headers, body: None })
    }
}

export!(Module);
