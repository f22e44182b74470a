//! `wasm push | ls | rm | logs`: calls of a gateway's `/wasm`.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use clap::ArgMatches;
use http::{Method, Request, StatusCode, header};
use http_body_util::Full;
use serde_json::{Map, Value, json};

use super::dial::Dial;
use super::text;

/// How often `logs --follow` looks.
const LOOK: Duration = Duration::from_secs(1);

struct Gateway {
    dial: Dial,
    key: Option<String>,
}

pub(super) fn run(command: &str, matches: &ArgMatches) -> Result<String, String> {
    let key =
        text(matches, "api-key").map(str::to_owned).or_else(|| std::env::var("BRANCHLINE_API_KEY").ok());
    let url = text(matches, "url").unwrap_or_default().trim_end_matches('/').to_owned();
    let gateway = Gateway { dial: Dial::new(&url, text(matches, "ca-cert").map(PathBuf::from))?, key };
    let runtime = crate::lifecycle::runtime(1).map_err(|error| error.to_string())?;
    let module = text(matches, "module").unwrap_or_default();
    runtime.block_on(async {
        match command {
            "push" => {
                let file = super::path(matches, "component");
                let mut settings = super::settings(text(matches, "settings"))?;
                if let Some(signature) = text(matches, "signature") {
                    let bytes = super::build::read(Path::new(signature))?;
                    settings.insert("signature".to_owned(), json!(STANDARD.encode(bytes)));
                }
                gateway.push(&file, text(matches, "name"), settings).await
            }
            "ls" => gateway.list().await,
            "rm" => gateway.remove(module).await,
            _ => gateway.logs(module, matches.get_flag("follow")).await,
        }
    })
}

impl Gateway {
    async fn call(&self, method: Method, path: &str, body: String) -> Result<Value, String> {
        let mut request = Request::builder().method(method).uri(path);
        if let Some(key) = &self.key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = request
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| format!("the request can't be made: {error}; check --api-key"))?;
        let (status, body) = self.dial.send(request).await?;
        let value: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
        match status.is_success() {
            true => Ok(value),
            false => Err(reason(status, &value)),
        }
    }

    async fn modules(&self) -> Result<Vec<Value>, String> {
        let listed = self.call(Method::GET, "/wasm", String::new()).await?;
        Ok(listed["modules"].as_array().cloned().unwrap_or_default())
    }

    /// The uuid of a name or uuid; none if it is nobody's.
    async fn find(&self, wanted: &str) -> Result<Option<String>, String> {
        let modules = self.modules().await?;
        let is = |module: &&Value| module["uuid"] == wanted || module["settings"]["name"] == wanted;
        Ok(modules.iter().find(is).and_then(|module| module["uuid"].as_str()).map(str::to_owned))
    }

    async fn known(&self, wanted: &str) -> Result<String, String> {
        self.find(wanted).await?.ok_or_else(|| format!("no module is named '{wanted}'; see `wasm ls`"))
    }

    async fn push(
        &self,
        file: &Path,
        name: Option<&str>,
        mut body: Map<String, Value>,
    ) -> Result<String, String> {
        let bytes = super::build::read(file)?;
        let name = name.map_or_else(|| super::stem(file), str::to_owned);
        body.insert("module".to_owned(), json!(STANDARD.encode(bytes)));
        let (method, path) = match self.find(&name).await? {
            Some(uuid) => (Method::PUT, format!("/wasm/{uuid}")),
            None => {
                body.insert("name".to_owned(), json!(name));
                (Method::POST, "/wasm".to_owned())
            }
        };
        let module = self.call(method, &path, Value::Object(body).to_string()).await?;
        Ok(line(&module))
    }

    async fn list(&self) -> Result<String, String> {
        Ok(self.modules().await?.iter().map(line).collect())
    }

    async fn remove(&self, wanted: &str) -> Result<String, String> {
        let uuid = self.known(wanted).await?;
        self.call(Method::DELETE, &format!("/wasm/{uuid}"), String::new()).await?;
        Ok(format!("removed {wanted}\n"))
    }

    async fn logs(&self, wanted: &str, follow: bool) -> Result<String, String> {
        let uuid = self.known(wanted).await?;
        let mut after = 0;
        loop {
            let answer =
                self.call(Method::GET, &format!("/wasm/{uuid}/logs?after={after}"), String::new()).await?;
            let mut out = String::new();
            for line in answer["lines"].as_array().into_iter().flatten() {
                after = line["number"].as_u64().unwrap_or(after);
                let (at, level, message) = (&line["at_ms"], &line["level"], &line["message"]);
                out +=
                    &format!("{at} {} {}\n", level.as_str().unwrap_or("?"), message.as_str().unwrap_or("?"));
            }
            if !follow {
                return Ok(out);
            }
            if std::io::stdout().write_all(out.as_bytes()).is_err() {
                return Ok(String::new());
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

fn line(module: &Value) -> String {
    let word = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    let hooks: Vec<String> = module["hooks"].as_array().into_iter().flatten().map(word).collect();
    let state = match (&module["quarantined"], &module["settings"]["enabled"]) {
        (Value::Bool(true), _) => "quarantined",
        (_, Value::Bool(false)) => "off",
        _ => "on",
    };
    format!(
        "{} {} v{} {state} order {} {} calls {} failed [{}]\n",
        word(&module["uuid"]),
        word(&module["settings"]["name"]),
        module["version"],
        module["settings"]["order"],
        module["calls"],
        module["failures"],
        hooks.join(" ")
    )
}

fn reason(status: StatusCode, value: &Value) -> String {
    let message = value["error"]["message"].as_str().unwrap_or("it did not say why");
    format!("the gateway refuses ({}): {message}", status.as_u16())
}
