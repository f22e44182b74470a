//! `wasm build`: source to component, by the tools of its language where there are any.

use std::path::{Path, PathBuf};
use std::process::Command;

use branchline_plugins::WIT;

pub(super) fn read(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("{} can't be read ({error})", path.display()))
}

/// Builds; says where the component is.
pub(super) fn build(source: &Path, output: Option<PathBuf>, world: Option<&str>) -> Result<String, String> {
    let output = output.unwrap_or_else(|| source.with_extension("wasm"));
    if output == source {
        return Err("source and output are the same file; give --output".to_owned());
    }
    let world = match world {
        Some(world) => world.to_owned(),
        None => default_world(source),
    };
    let scratch = tempfile::tempdir().map_err(|error| format!("no folder to build in: {error}"))?;
    let wit = scratch.path().join("wit");
    std::fs::create_dir(&wit)
        .and_then(|()| std::fs::write(wit.join("middleware.wit"), WIT))
        .map_err(|error| format!("no folder to build in: {error}"))?;
    let job = Job { source, output: &output, world: &world, wit: &wit, scratch: scratch.path() };
    let has = |name: &str| source.join(name).is_file();
    if source.is_file() {
        job.componentize(&read(source)?)?;
    } else if has("app.py") {
        job.python()?;
    } else if has("app.js") {
        job.javascript()?;
    } else if has("main.c") {
        job.c()?;
    } else if has("Cargo.toml") {
        job.rust()?;
    } else if let Some(text) = only_text(source) {
        job.componentize(&read(&text)?)?;
    } else {
        let shown = source.display();
        return Err(format!(
            "{shown} has none of app.py, app.js, main.c, Cargo.toml and one .wat; see `wasm new`"
        ));
    }
    let size = std::fs::metadata(&output).map_or(0, |data| data.len());
    Ok(format!("{} ({size} bytes, world {world})\n", output.display()))
}

/// The one file in text format of a folder.
fn only_text(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut texts = entries.filter(|path| path.extension().is_some_and(|end| end == "wat"));
    let text = texts.next()?;
    texts.next().is_none().then_some(text)
}

/// A folder says in its file `world` which one it is for.
fn default_world(source: &Path) -> String {
    let said = std::fs::read_to_string(source.join("world")).unwrap_or_default();
    match said.trim() {
        "" => "request-filter".to_owned(),
        world => world.to_owned(),
    }
}

struct Job<'a> {
    source: &'a Path,
    output: &'a Path,
    world: &'a str,
    wit: &'a Path,
    scratch: &'a Path,
}

impl Job<'_> {
    fn componentize(&self, core: &[u8]) -> Result<(), String> {
        let component = componentize(core, self.world)?;
        std::fs::write(self.output, component)
            .map_err(|error| format!("{} can't be written ({error})", self.output.display()))
    }

    fn run(&self, command: &mut Command, install: &str) -> Result<(), String> {
        let shown = command.get_program().to_string_lossy().into_owned();
        let done = command.output().map_err(|error| format!("{shown} can't be run ({error}); {install}"))?;
        if done.status.success() {
            return Ok(());
        }
        let said = [done.stdout, done.stderr].concat();
        Err(format!("{shown} failed: {}", String::from_utf8_lossy(&said).trim()))
    }

    fn python(&self) -> Result<(), String> {
        let output = absolute(self.output)?;
        let mut command = Command::new(tool("BRANCHLINE_COMPONENTIZE_PY", "componentize-py"));
        command.arg("-d").arg(self.wit).args(["-w", self.world, "componentize", "--stub-wasi", "app", "-o"]);
        command.arg(output).current_dir(self.source);
        self.run(&mut command, "pip install componentize-py")
    }

    fn javascript(&self) -> Result<(), String> {
        // The tool only sees what is below the folder it runs in.
        let (output, here) = (absolute(self.output)?, self.scratch);
        std::fs::copy(self.source.join("app.js"), here.join("app.js"))
            .map_err(|error| format!("app.js can't be copied ({error})"))?;
        let mut command = Command::new(tool("BRANCHLINE_JCO", "jco"));
        command.args(["componentize", "app.js", "--wit", "wit", "-n", self.world]).args([
            "--backend",
            "quickjs",
            "--backend-qjs-disable-async",
            "--backend-qjs-stub-wasi",
            "-o",
        ]);
        command.arg(output).current_dir(here);
        self.run(&mut command, "npm install -g @bytecodealliance/jco")
    }

    fn c(&self) -> Result<(), String> {
        let core = self.scratch.join("core.wasm");
        let mut command = Command::new(tool("BRANCHLINE_CLANG", "clang-19"));
        command.args(["--target=wasm32", "-O2", "-nostdlib", "-fno-builtin", "-Wl,--no-entry", "-o"]);
        command.arg(&core).arg(self.source.join("main.c"));
        self.run(&mut command, "apt-get install clang-19 lld-19")?;
        self.componentize(&read(&core)?)
    }

    fn rust(&self) -> Result<(), String> {
        // The folder's own, so that a second build is quick.
        let target = absolute(&self.source.join("target"))?;
        let mut command = Command::new(tool("CARGO", "cargo"));
        command.args(["build", "--release", "--quiet", "--target", "wasm32-unknown-unknown", "--target-dir"]);
        command.arg(&target).current_dir(self.source);
        self.run(&mut command, "install Rust, and rustup target add wasm32-unknown-unknown")?;
        let folder = target.join("wasm32-unknown-unknown/release");
        let built = std::fs::read_dir(&folder).map_err(|error| format!("cargo built nothing ({error})"))?;
        let mut built = built.filter_map(|entry| Some(entry.ok()?.path()));
        let core = built.find(|path| path.extension().is_some_and(|extension| extension == "wasm"));
        let core = core.ok_or("cargo built no .wasm; set crate-type = [\"cdylib\"]")?;
        // The world is in the module already: wit-bindgen put it there.
        self.componentize(&read(&core)?)
    }
}

fn tool(variable: &str, usual: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| usual.to_owned())
}

fn absolute(path: &Path) -> Result<PathBuf, String> {
    std::path::absolute(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn componentize(core: &[u8], world: &str) -> Result<Vec<u8>, String> {
    branchline_plugins::componentize::middleware(core, world).map_err(|error| error.message)
}
