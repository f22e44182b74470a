//! `/wasm`: operators load, list, replace, change, try and remove modules. Ours and SGLang's gateway's shapes.

use std::path::Path as FilePath;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{DefaultBodyLimit, FromRequest as _, Multipart, Path, Query, State};
use axum::response::Response;
use axum::routing::{get, post};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use branchline_core::{Error, ErrorCode, Result};
use branchline_plugins::{self as plugins, Hook, MODULE_CAP_BYTES, Signature, Spec};
use http::{HeaderValue, Request, StatusCode, header};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::answer::{Refusal, json as answer};
use super::dry_run;
use crate::app::App;
use crate::guard::{BodyLimit, read_body};

type Answered = std::result::Result<Response, Refusal>;
type Named = std::result::Result<Path<Uuid>, PathRejection>;

/// A module in base64 with its settings around it.
const UPLOAD_CAP: usize = MODULE_CAP_BYTES / 3 * 4 + (1 << 20);

/// All of this module's routes.
pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/wasm", get(list).post(add))
        .route("/wasm/{uuid}", get(one).put(replace).patch(change).delete(remove))
        .route("/wasm/{uuid}/dry-run", post(try_out))
        .route("/wasm/{uuid}/logs", get(logs))
        // Uploads are counted by their own limit.
        .layer(DefaultBodyLimit::disable())
}

fn named(uuid: Named) -> Result<Uuid> {
    match uuid {
        Ok(Path(uuid)) => Ok(uuid),
        Err(_) => {
            Err(Error::new(ErrorCode::NotFound, "the module's uuid can't be read; GET /wasm lists all"))
        }
    }
}

async fn list(State(app): State<Arc<App>>) -> Response {
    answer(StatusCode::OK, &app.plugins.describe())
}

async fn one(State(app): State<Arc<App>>, uuid: Named) -> Answered {
    let module = app.plugins.get(named(uuid)?)?;
    Ok(answer(StatusCode::OK, &module.describe()))
}

async fn remove(State(app): State<Arc<App>>, uuid: Named) -> Answered {
    let module = app.plugins.remove(named(uuid)?).await?;
    Ok(answer(StatusCode::OK, &json!({"removed": module.uuid(), "name": module.spec.name})))
}

#[derive(Deserialize)]
struct After {
    #[serde(default)]
    after: u64,
}

async fn logs(State(app): State<Arc<App>>, uuid: Named, Query(After { after }): Query<After>) -> Answered {
    let module = app.plugins.get(named(uuid)?)?;
    Ok(answer(StatusCode::OK, &json!({"name": module.spec.name, "lines": module.lines(after)})))
}

/// An upload, in whichever shape it came.
#[derive(Debug, Default)]
struct Upload {
    /// None for changes of settings alone.
    bytes: Option<Vec<u8>>,
    /// Whoever signed the bytes.
    signature: Option<Signature>,
    /// The file that named the bytes.
    origin: Option<String>,
    /// Settings as in [`Spec`].
    settings: Map<String, Value>,
}

impl Upload {
    fn setting(&mut self, name: &str, text: &str) -> Result<()> {
        let value = match name {
            "name" | "fail" | "signature" => Value::String(text.to_owned()),
            "hooks" | "attach_points" => {
                text.split(',').map(str::trim).filter(|hook| !hook.is_empty()).collect::<Vec<_>>().into()
            }
            _ => serde_json::from_str(text)
                .map_err(|error| Error::invalid(name, format!("`{name}` is no JSON ({error})")))?,
        };
        match (name, value) {
            ("settings", Value::Object(settings)) => self.settings.extend(settings),
            ("settings", _) => return Err(Error::invalid("settings", "`settings` is no JSON object")),
            (name, value) => {
                self.settings.insert(name.to_owned(), value);
            }
        }
        Ok(())
    }

    /// Spelling of the field's other gateway, and defaults that depend on the bytes.
    fn tidy(mut self) -> Result<Self> {
        match self.settings.remove("signature") {
            None => {}
            Some(Value::String(text)) => self.signature = Some(text.into()),
            Some(_) => {
                return Err(Error::invalid("signature", "`signature` is no string; give it in base64"));
            }
        }
        if let Some(points) = self.settings.remove("attach_points") {
            self.settings.insert("hooks".to_owned(), points);
        }
        if let Some(hooks) = self.settings.get_mut("hooks") {
            *hooks = spelled(hooks)?;
        }
        Ok(self)
    }
}

/// Hooks as `on-request`, from `"on-request"`, `"OnRequest"` or `{"Middleware": "OnRequest"}`.
fn spelled(hooks: &Value) -> Result<Value> {
    let wrong = |hook: &Value| {
        let names = Hook::ALL.map(Hook::name).join(", ");
        Error::invalid("hooks", format!("{hook} is no hook; use some of: {names}"))
    };
    let list = hooks.as_array().ok_or_else(|| Error::invalid("hooks", "`hooks` is no list; give one"))?;
    let names = list.iter().map(|hook| {
        let text = hook.as_str().or_else(|| hook.get("Middleware").and_then(Value::as_str));
        text.and_then(Hook::parse).map(|hook| Value::from(hook.name())).ok_or_else(|| wrong(hook))
    });
    Ok(Value::Array(names.collect::<Result<_>>()?))
}

fn kind(request: &Request<Body>) -> String {
    let kind = request.headers().get(header::CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    String::from_utf8_lossy(kind).split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

/// Settings in the query, for uploads of bare bytes.
fn from_query(upload: &mut Upload, request: &Request<Body>) -> Result<()> {
    let Ok(Query(pairs)) = Query::<Vec<(String, String)>>::try_from_uri(request.uri()) else { return Ok(()) };
    pairs.iter().try_for_each(|(name, value)| upload.setting(name, value))
}

async fn read(app: &App, request: Request<Body>) -> Result<Upload> {
    let mut upload = Upload::default();
    from_query(&mut upload, &request)?;
    let kind = kind(&request);
    if kind == "multipart/form-data" {
        return multipart(upload, request).await?.tidy();
    }
    let limit = BodyLimit { bytes: UPLOAD_CAP, ..app.body_limit() };
    let body = read_body(request.into_body(), limit).await?;
    if matches!(kind.as_str(), "application/wasm" | "application/octet-stream") {
        upload.bytes = Some(body.into());
        return upload.tidy();
    }
    let whole: Map<String, Value> = serde_json::from_slice(&body).map_err(|error| {
        let message = format!(
            "the body is no JSON object ({error}); send one, multipart/form-data or application/wasm"
        );
        Error::new(ErrorCode::InvalidArgument, message)
    })?;
    upload.settings.extend(whole);
    let text = |upload: &mut Upload, field: &str| match upload.settings.remove(field) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(Error::invalid(field, format!("`{field}` is no string; give one"))),
    };
    let (module, path, file) =
        (text(&mut upload, "module")?, text(&mut upload, "path")?, text(&mut upload, "file_path")?);
    if let Some(module) = module {
        let bytes = STANDARD
            .decode(module.trim())
            .map_err(|error| Error::invalid("module", format!("`module` is no base64 ({error})")))?;
        upload.bytes = Some(bytes);
    } else if let Some(path) = path.or(file) {
        upload.bytes = Some(app.plugins.read_path(FilePath::new(&path)).await?);
        upload.origin = Some(path);
    }
    upload.tidy()
}

async fn multipart(mut upload: Upload, request: Request<Body>) -> Result<Upload> {
    let broken = |error: &dyn std::fmt::Display| {
        Error::new(ErrorCode::InvalidArgument, format!("the multipart body can't be read: {error}"))
    };
    let mut parts =
        Multipart::from_request(request, &()).await.map_err(|error| broken(&error.body_text()))?;
    let mut total = 0;
    while let Some(mut part) = parts.next_field().await.map_err(|error| broken(&error.body_text()))? {
        let name = part.name().unwrap_or_default().to_owned();
        let file = part.file_name().map(str::to_owned);
        let mut bytes = Vec::new();
        while let Some(chunk) = part.chunk().await.map_err(|error| broken(&error.body_text()))? {
            total += chunk.len();
            if total > UPLOAD_CAP {
                let message = format!("the upload is over {UPLOAD_CAP} bytes; build a smaller module");
                return Err(Error::new(ErrorCode::PayloadTooLarge, message));
            }
            bytes.extend_from_slice(&chunk);
        }
        if matches!(name.as_str(), "module" | "file") {
            upload.bytes = Some(bytes);
            let stem = file
                .as_deref()
                .and_then(|file| FilePath::new(file).file_stem())
                .and_then(|stem| stem.to_str());
            if let Some(stem) = stem {
                upload.settings.entry("name").or_insert_with(|| stem.into());
            }
            continue;
        }
        let text = String::from_utf8(bytes).map_err(|error| broken(&error))?;
        upload.setting(&name, &text)?;
    }
    Ok(upload)
}

async fn add(State(app): State<Arc<App>>, request: Request<Body>) -> Answered {
    let mut upload = read(&app, request).await?;
    if let Some(Value::Array(modules)) = upload.settings.remove("modules") {
        return add_all(&app, modules).await;
    }
    let (module, new) = load(&app, upload).await?;
    let status = if new { StatusCode::CREATED } else { StatusCode::OK };
    Ok(answer(status, &module.describe()))
}

async fn load(app: &App, upload: Upload) -> Result<(Arc<plugins::Module>, bool)> {
    let Upload { bytes, signature, origin, mut settings } = upload;
    let Some(bytes) = bytes else {
        let message = "no module is given; send its bytes as `module`, or a `path` on the server";
        return Err(Error::invalid("module", message));
    };
    // Which kind it is says SGLang's gateway; there is one.
    settings.remove("module_type");
    let spec = Spec::default_named(&settings)?;
    app.plugins.add(spec, plugins::Upload { bytes, signature, origin }).await
}

/// The list of SGLang's gateway: every module with its own outcome.
async fn add_all(app: &App, modules: Vec<Value>) -> Answered {
    let (mut shown, mut failed) = (Vec::new(), false);
    for mut module in modules {
        let outcome = add_listed(app, &module).await;
        failed = failed || outcome.is_err();
        let result = match outcome {
            Ok(uuid) => json!({"Success": uuid}),
            Err(error) => json!({"Error": error.message}),
        };
        match module.as_object_mut() {
            Some(module) => drop(module.insert("add_result".to_owned(), result)),
            None => module = json!({"given": module, "add_result": result}),
        }
        shown.push(module);
    }
    let status = if failed { StatusCode::BAD_REQUEST } else { StatusCode::OK };
    Ok(answer(status, &json!({"modules": shown})))
}

async fn add_listed(app: &App, module: &Value) -> Result<Uuid> {
    let mut settings = module.as_object().cloned().ok_or_else(|| {
        Error::invalid("modules", "an entry of `modules` is no object; give name and file_path")
    })?;
    let path = settings.remove("file_path");
    let path = path.as_ref().and_then(Value::as_str).ok_or_else(|| {
        Error::invalid("file_path", "`file_path` is missing; name a file below --wasm-upload-dirs")
    })?;
    let bytes = Some(app.plugins.read_path(FilePath::new(path)).await?);
    let upload = Upload { bytes, settings, origin: Some(path.to_owned()), signature: None };
    let (module, _) = load(app, upload.tidy()?).await?;
    Ok(module.uuid())
}

async fn replace(State(app): State<Arc<App>>, uuid: Named, request: Request<Body>) -> Answered {
    let uuid = named(uuid)?;
    let mut upload = read(&app, request).await?;
    let Some(bytes) = upload.bytes else {
        let message = "no module is given; send its bytes, or change settings alone with PATCH";
        return Err(Error::invalid("module", message).into());
    };
    // A file's name is no wish for another module's name.
    upload.settings.remove("name");
    let new = plugins::Upload { bytes, signature: upload.signature, origin: upload.origin };
    let module = app.plugins.change(uuid, &Value::Object(upload.settings), Some(new)).await?;
    Ok(answer(StatusCode::OK, &module.describe()))
}

async fn change(State(app): State<Arc<App>>, uuid: Named, request: Request<Body>) -> Answered {
    let uuid = named(uuid)?;
    let upload = read(&app, request).await?;
    if upload.bytes.is_some() || upload.signature.is_some() {
        return Err(
            Error::invalid("module", "PATCH changes settings; replace bytes and signature with PUT").into()
        );
    }
    let module = app.plugins.change(uuid, &Value::Object(upload.settings), None).await?;
    Ok(answer(StatusCode::OK, &module.describe()))
}

async fn try_out(State(app): State<Arc<App>>, uuid: Named, request: Request<Body>) -> Answered {
    let module = app.plugins.get(named(uuid)?)?;
    let body = read_body(request.into_body(), app.body_limit()).await?;
    Ok(answer(StatusCode::OK, &dry_run::run(&module.twin(), &body, 0).await?))
}
