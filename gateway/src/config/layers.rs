//! The layers an option's value can come from, lowest first: default, file, environment, flag.
//!
//! A layer holds texts by field name. Unknown names and unreadable sources become faults here; all of
//! them are reported together, before any port opens.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use super::table::TABLE;
use super::value::{Shape, Value, nearest};

/// One thing wrong with the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Where it was given: `--port`, `BRANCHLINE_ROUTER_PORT`, `router.toml: port`.
    pub place: String,
    /// What is wrong and what to do.
    pub message: String,
}

impl Fault {
    /// A fault of a place.
    pub fn new(place: impl Into<String>, message: impl Into<String>) -> Self {
        Self { place: place.into(), message: message.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

struct Given {
    place: String,
    texts: Vec<String>,
}

/// Values by field; a later `put` of a field wins over an earlier one.
#[derive(Default)]
pub struct Layers {
    given: BTreeMap<&'static str, Given>,
    faults: Vec<Fault>,
}

impl Layers {
    /// Sets a field by any spelling of its name (`worker-urls`, `worker_urls`); unknown names become a fault.
    pub fn put(&mut self, name: &str, place: String, texts: Vec<String>) {
        match field_of(name) {
            Some(field) => {
                self.given.insert(field, Given { place, texts });
            }
            None => self.faults.push(Fault::new(place, unknown(name, ""))),
        }
    }

    /// Notes a fault found outside.
    pub fn fault(&mut self, fault: Fault) {
        self.faults.push(fault);
    }

    /// Takes all variables of ours from an environment.
    pub fn put_env(&mut self, variables: impl Iterator<Item = (String, String)>) {
        for (variable, value) in variables {
            let Some(name) = variable.strip_prefix("BRANCHLINE_ROUTER_") else { continue };
            let name = name.to_ascii_lowercase();
            let texts = match shape_of(&name) {
                Some(Shape::List) => value
                    .split(|c: char| c == ',' || c.is_whitespace())
                    .filter(|part| !part.is_empty())
                    .map(str::to_owned)
                    .collect(),
                _ => vec![value],
            };
            self.put(&name, variable.clone(), texts);
        }
    }

    /// Takes all keys of a TOML file.
    pub fn put_file(&mut self, path: &Path) {
        let shown = path.display();
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) => {
                let message = format!("{shown} can't be read ({error}); give the path of a TOML file");
                return self.fault(Fault::new("--config", message));
            }
        };
        let table: toml::Table = match toml::from_str(&text) {
            Ok(table) => table,
            Err(error) => {
                let message = format!("is not valid TOML: {}", error.to_string().trim().replace('\n', " "));
                return self.fault(Fault::new(shown.to_string(), message));
            }
        };
        for (name, value) in table {
            let place = format!("{shown}: {name}");
            match texts_of(&value) {
                Some(texts) => self.put(&name, place, texts),
                None => {
                    self.fault(Fault::new(place, "is a table or nested list; give one value or a flat list"))
                }
            }
        }
    }

    /// Puts another layer on top.
    pub(super) fn overlay(&mut self, top: Self) {
        self.given.extend(top.given);
        self.faults.extend(top.faults);
    }

    /// All faults so far.
    pub(super) fn take_faults(&mut self) -> Vec<Fault> {
        std::mem::take(&mut self.faults)
    }

    /// The place that a field's value came from, for faults of the resolved value.
    pub(super) fn place(&self, field: &str) -> String {
        self.given
            .get(field)
            .map_or_else(|| format!("--{}", field.replace('_', "-")), |given| given.place.clone())
    }

    pub(super) fn read<T: Value>(&self, field: &str, default: &str, faults: &mut Vec<Fault>) -> Option<T> {
        let fallback: Vec<String> = if default.is_empty() { Vec::new() } else { vec![default.to_owned()] };
        let texts = self.given.get(field).map_or(&fallback, |given| &given.texts);
        match T::parse(texts) {
            Ok(value) => Some(value),
            Err(message) => {
                faults.push(Fault::new(self.place(field), message));
                None
            }
        }
    }
}

fn texts_of(value: &toml::Value) -> Option<Vec<String>> {
    let scalar = |value: &toml::Value| match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(flag) => Some(flag.to_string()),
        _ => None,
    };
    match value {
        toml::Value::Array(items) => items.iter().map(scalar).collect(),
        value => scalar(value).map(|text| vec![text]),
    }
}

fn field_of(name: &str) -> Option<&'static str> {
    let wanted = name.replace('-', "_");
    TABLE.iter().find(|row| row.field == wanted).map(|row| row.field)
}

fn shape_of(name: &str) -> Option<Shape> {
    TABLE.iter().find(|row| row.field == name).map(|row| row.shape)
}

/// The refusal of a name that no row has; `dashes` stand before names where it was given.
pub(super) fn unknown(name: &str, dashes: &str) -> String {
    let wanted = name.replace('_', "-").to_ascii_lowercase();
    let names: Vec<String> = TABLE.iter().map(super::table::Row::name).collect();
    match nearest(&wanted, names.iter().map(String::as_str)) {
        Some(near) => format!("no option has this name; did you mean '{dashes}{near}'?"),
        None => "no option has this name; --help lists all".to_owned(),
    }
}
