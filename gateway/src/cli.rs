//! The command line as a function, shared by the binary and the wheel's console script.
//!
//! Exit codes: 0 after a drained stop, help or a page; 1 if the gateway can't start or a second signal cut
//! the drain short; 2 for faults of the command line, the environment or the file.

use std::io::Write as _;
use std::process::ExitCode;

use crate::config::{Options, Outcome, resolve};
use crate::lifecycle::{Server, StopSignals, runtime, start_logging};

/// Runs a command line given without the program's name.
pub fn run(arguments: &[String]) -> ExitCode {
    ExitCode::from(run_code(arguments))
}

/// As [`run`], with the code as a number for callers that are no Rust `main`.
pub fn run_code(arguments: &[String]) -> u8 {
    if let Some((first, rest)) = arguments.split_first()
        && first == "wasm"
    {
        return crate::authoring::run(rest);
    }
    // Values that are not UTF-8 can't be options of ours.
    let environment = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    match resolve(arguments, environment) {
        Outcome::Serve(options) => serve(options),
        Outcome::Exit { text, code } => {
            let written = match code {
                0 => std::io::stdout().write_all(text.as_bytes()),
                _ => std::io::stderr().write_all(text.as_bytes()),
            };
            // A closed pipe (`--help | head`) is the reader's choice.
            drop(written);
            code
        }
    }
}

fn serve(options: Options) -> u8 {
    if let Err(error) = start_logging(&options) {
        return fail(&error);
    }
    let runtime = match runtime(options.runtime_threads) {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error),
    };
    let code = runtime.block_on(async {
        let mut signals = match StopSignals::listen() {
            Ok(signals) => signals,
            Err(error) => return fail(&error),
        };
        let server = match Server::bind(options).await {
            Ok(server) => server,
            Err(error) => return fail(&error),
        };
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let mut running = std::pin::pin!(server.run(async {
            // A dropped sender stops too.
            drop(stopped.await);
        }));
        tokio::select! {
            () = running.as_mut() => return 0,
            () = signals.next() => drop(stop),
        }
        tokio::select! {
            () = running => 0,
            () = signals.next() => fail(&"second signal, leaving at once"),
        }
    });
    // A blocking task must not hold the exit up.
    runtime.shutdown_background();
    code
}

fn fail(error: &dyn std::fmt::Display) -> u8 {
    drop(writeln!(std::io::stderr(), "error: {error}"));
    1
}
