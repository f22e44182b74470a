//! `wasm new`: a folder that builds, from the examples.

use std::path::Path;

/// What `--lang` takes.
pub(super) const LANGUAGES: [&str; 5] = ["python", "javascript", "c", "rust", "wat"];

macro_rules! example {
    ($path:literal) => {
        include_str!(concat!("../../../examples/middleware/", $path))
    };
}

/// Makes the folder; says what to do next.
pub(super) fn make(folder: &Path, language: &str) -> Result<String, String> {
    let files: &[(&str, &str)] = match language {
        "javascript" => {
            &[("app.js", example!("prompt-injection/app.js")), ("world", example!("prompt-injection/world"))]
        }
        "c" => &[("main.c", example!("canary/main.c")), ("world", example!("canary/world"))],
        "rust" => &[
            ("Cargo.toml", example!("api-key-tenant/Cargo.toml")),
            ("Cargo.lock", example!("api-key-tenant/Cargo.lock")),
            ("src/lib.rs", example!("api-key-tenant/src/lib.rs")),
            ("world", example!("api-key-tenant/world")),
            ("wit/middleware.wit", branchline_plugins::WIT),
        ],
        "wat" => &[("noop.wat", example!("noop/noop.wat"))],
        _ => &[("app.py", example!("pii-redaction/app.py")), ("world", example!("pii-redaction/world"))],
    };
    if folder.exists() {
        return Err(format!("{} is there already; give a new folder", folder.display()));
    }
    for (name, text) in files {
        let path = folder.join(name);
        let made =
            path.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| std::fs::write(&path, text));
        made.map_err(|error| format!("{} can't be written ({error})", path.display()))?;
    }
    let source = if language == "wat" { folder.join("noop.wat") } else { folder.to_owned() };
    let shown = source.display();
    Ok(format!("made {}\nnext: branchline-router wasm build {shown} -o module.wasm\n", folder.display()))
}
