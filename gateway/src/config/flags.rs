//! The command line, made from the option table by clap, plus the few flags that are not options.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Arg, ArgAction, Command};

use super::layers::{Fault, Layers, unknown};
use super::table::TABLE;
use super::value::Shape;

/// What a command line asks for.
pub(super) enum Invocation {
    /// Serve with the flags now in the layers.
    Serve {
        /// The file to read below environment and flags.
        config: Option<PathBuf>,
    },
    /// Print this text and leave with this exit code.
    Print {
        /// Help, version or a usage error.
        text: String,
        /// 0, or 2 for a usage error.
        code: u8,
    },
    /// Print a generated page.
    Reference(String),
}

/// Reads a command line without the program's name; flag values go into `layers`.
pub(super) fn read_flags(arguments: &[String], layers: &mut Layers) -> Invocation {
    let known = drop_unknown(arguments, layers);
    let line = std::iter::once("branchline-router".to_owned()).chain(known).map(OsString::from);
    let matches = match command().try_get_matches_from(line) {
        Ok(matches) => matches,
        Err(error) => {
            let code = u8::try_from(error.exit_code()).unwrap_or(2);
            return Invocation::Print { text: error.render().to_string(), code };
        }
    };
    if let Some(page) = matches.get_one::<String>("print-reference") {
        return Invocation::Reference(page.clone());
    }
    for row in TABLE {
        let Some(values) = matches.get_many::<String>(row.field) else { continue };
        layers.put(row.field, format!("--{}", row.name()), values.cloned().collect());
    }
    Invocation::Serve { config: matches.get_one::<String>("config").map(PathBuf::from) }
}

/// Notes every unknown flag (clap would stop at the first) and returns the rest.
fn drop_unknown(arguments: &[String], layers: &mut Layers) -> Vec<String> {
    let command = command();
    let names: Vec<&str> =
        command.get_arguments().filter_map(Arg::get_long).chain(["help", "version"]).collect();
    let mut kept = Vec::with_capacity(arguments.len());
    let mut dropping = false;
    for argument in arguments {
        let Some(flag) = argument.strip_prefix("--") else {
            // The values of a dropped flag go with it.
            if !dropping || argument.starts_with('-') {
                dropping = false;
                kept.push(argument.clone());
            }
            continue;
        };
        let name = flag.split_once('=').map_or(flag, |(name, _)| name);
        dropping = !names.contains(&name);
        match dropping {
            true => layers.fault(Fault::new(format!("--{name}"), unknown(name, "--"))),
            false => kept.push(argument.clone()),
        }
    }
    kept
}

/// The command that `--help` describes.
pub(super) fn command() -> Command {
    let own = [
        Arg::new("config")
            .long("config")
            .value_name("FILE")
            .help("TOML file of options; environment and flags win over it"),
        Arg::new("print-reference")
            .long("print-reference")
            .value_name("PAGE")
            .value_parser(clap::builder::PossibleValuesParser::new(super::reference::PAGES))
            .help("Print a generated page and leave"),
    ];
    Command::new("branchline-router")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Routes language model requests to the worker that has their prefix")
        .after_help("Middleware: branchline-router wasm --help.\nOrder: default < file (--config) < environment (BRANCHLINE_ROUTER_<NAME>) < flag.")
        .args(own)
        .args(TABLE.iter().map(argument))
}

fn argument(row: &'static super::table::Row) -> Arg {
    let default = match row.default {
        "" => String::new(),
        default => format!(" [default: {default}]"),
    };
    let choices = match row.shape {
        Shape::Choice(names) => format!(" [one of: {}]", names().join(", ")),
        _ => String::new(),
    };
    let arg =
        Arg::new(row.field).long(row.name()).help(format!("{}{choices}{default}", row.doc.replace('`', "")));
    match row.shape {
        Shape::Switch => arg
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true")
            .action(ArgAction::Set)
            .value_name("BOOL"),
        Shape::List => {
            arg.num_args(1..).action(ArgAction::Append).value_name(row.shape.word().to_uppercase())
        }
        // A scalar given twice is read as two values and refused with both in view.
        _ => arg.num_args(1).action(ArgAction::Set).value_name(row.shape.word().to_uppercase()),
    }
}
