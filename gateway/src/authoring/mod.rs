//! `branchline-router wasm …`: what authors and operators of middleware do from a command line.
//!
//! `new`, `build` and `test` work on this machine; `push`, `ls`, `rm` and `logs` talk to a running gateway.

mod build;
mod dial;
mod remote;
mod scaffold;
mod trial;

use std::io::Write as _;
use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Command};

/// Runs the line after `wasm`; the process's exit code.
pub fn run(arguments: &[String]) -> u8 {
    let line = std::iter::once("branchline-router wasm".to_owned()).chain(arguments.iter().cloned());
    let matches = match command().try_get_matches_from(line) {
        Ok(matches) => matches,
        Err(error) => {
            drop(error.print());
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    match dispatch(&matches) {
        Ok(text) => {
            drop(std::io::stdout().write_all(text.as_bytes()));
            0
        }
        Err(error) => {
            drop(writeln!(std::io::stderr(), "error: {error}"));
            1
        }
    }
}

fn required(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).required(true).value_name(name.to_uppercase()).help(help)
}

fn option(name: &'static str, word: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_name(word).help(help)
}

fn command() -> Command {
    let remote = || {
        [
            option("url", "URL", "The gateway").default_value("http://127.0.0.1:30000"),
            option("api-key", "KEY", "Its key; or the environment's BRANCHLINE_API_KEY"),
            option("ca-cert", "FILE", "Authorities to believe, for https; the system's without it"),
        ]
    };
    Command::new("branchline-router wasm")
        .about("Makes, tries and loads WebAssembly middleware; see docs/middleware.md")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            Command::new("new")
                .about("Begins a module in a new folder")
                .arg(required("folder", "The folder to make"))
                .arg(
                    option("lang", "LANG", "Its language")
                        .value_parser(scaffold::LANGUAGES)
                        .default_value("python"),
                ),
        )
        .subcommand(
            Command::new("build")
                .about("Builds a component from a folder, a text file or a core module")
                .arg(required(
                    "source",
                    "A folder with app.py, app.js, main.c or Cargo.toml; or a .wat or .wasm file",
                ))
                .arg(option("output", "FILE", "Where to; SOURCE.wasm without it").short('o'))
                .arg(option(
                    "world",
                    "WORLD",
                    "World of branchline:middleware; the file `world` of the folder without it",
                )),
        )
        .subcommand(
            Command::new("test")
                .about("Calls hooks of a component on this machine; prints each action and its cost")
                .arg(required("component", "The .wasm file"))
                .arg(
                    option(
                        "sample",
                        "FILE",
                        "JSON as POST /wasm/{uuid}/dry-run takes it; may be given again",
                    )
                    .action(ArgAction::Append),
                )
                .arg(option("settings", "JSON", "Settings, for example {\"config\": …}")),
        )
        .subcommand(
            Command::new("push")
                .about("Loads a component, or replaces the one of the same name")
                .arg(required("component", "The .wasm file"))
                .arg(option("name", "NAME", "Its name; the file's without it"))
                .arg(option("settings", "JSON", "Settings, for example {\"order\": 5, \"fail\": \"open\"}"))
                .arg(option("signature", "FILE", "64 bytes of Ed25519, by `openssl pkeyutl -sign -rawin`"))
                .args(remote()),
        )
        .subcommand(Command::new("ls").about("Lists the modules").args(remote()))
        .subcommand(
            Command::new("rm")
                .about("Removes a module")
                .arg(required("module", "Name or uuid"))
                .args(remote()),
        )
        .subcommand(
            Command::new("logs")
                .about("Prints what a module logged")
                .arg(required("module", "Name or uuid"))
                .arg(Arg::new("follow").long("follow").short('f').action(ArgAction::SetTrue).help("Go on"))
                .args(remote()),
        )
}

fn text<'a>(matches: &'a ArgMatches, name: &str) -> Option<&'a str> {
    matches.try_get_one::<String>(name).ok().flatten().map(String::as_str)
}

fn path(matches: &ArgMatches, name: &str) -> PathBuf {
    PathBuf::from(text(matches, name).unwrap_or_default())
}

fn dispatch(matches: &ArgMatches) -> Result<String, String> {
    let Some((name, matches)) = matches.subcommand() else { return Err("no command".to_owned()) };
    match name {
        "new" => scaffold::make(&path(matches, "folder"), text(matches, "lang").unwrap_or("python")),
        "build" => {
            let output = text(matches, "output").map(PathBuf::from);
            build::build(&path(matches, "source"), output, text(matches, "world"))
        }
        "test" => {
            let samples = matches.get_many::<String>("sample").unwrap_or_default();
            let samples: Vec<_> = samples.map(PathBuf::from).collect();
            trial::run(&path(matches, "component"), &samples, text(matches, "settings"))
        }
        _ => remote::run(name, matches),
    }
}

/// Settings given as JSON text.
fn settings(given: Option<&str>) -> Result<serde_json::Map<String, serde_json::Value>, String> {
    let given = given.unwrap_or("{}");
    serde_json::from_str(given)
        .map_err(|error| format!("--settings is no JSON object ({error}); it is {given:?}"))
}

/// A name for a module, from its file.
fn stem(path: &std::path::Path) -> String {
    path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_an_object_or_named_as_wrong() {
        assert!(settings(None).expect("none is fine").is_empty());
        let given = settings(Some(r#"{"order": 5}"#)).expect("an object");
        assert_eq!(given["order"], 5);
        for wrong in ["[]", "5", "{", ""] {
            let error = settings(Some(wrong)).expect_err(wrong);
            assert!(error.contains("--settings"), "{error}");
        }
    }

    #[test]
    fn a_module_is_named_after_its_file() {
        for (file, name) in [("a/b/gate.wasm", "gate"), ("gate", "gate"), ("x.y.wasm", "x.y"), ("", "")] {
            assert_eq!(stem(std::path::Path::new(file)), name);
        }
    }

    #[test]
    fn the_commands_hold_together_and_each_remote_one_takes_url_and_key() {
        command().debug_assert();
        for name in ["push", "ls", "rm", "logs"] {
            let all = command();
            let found = all.find_subcommand(name).expect("it is there");
            for option in ["url", "api-key", "ca-cert"] {
                assert!(found.get_arguments().any(|arg| arg.get_id() == option), "{name} {option}");
            }
        }
        for name in ["new", "build", "test"] {
            let all = command();
            let found = all.find_subcommand(name).expect("it is there");
            assert!(!found.get_arguments().any(|arg| arg.get_id() == "url"), "{name} is local");
        }
    }
}
