//! Core modules and text format made into components, for authors and tests.
//!
//! A core module says by the names of its exports which interfaces it has; the world is made to fit.

use branchline_core::{Error, Result};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

/// Makes a component of WebAssembly text or of a core module; a component passes as it is.
///
/// `wit` is the text of the package that holds `world`, further packages it uses before it.
///
/// # Errors
/// `InvalidArgument` with what the tools say.
pub fn component(source: &[u8], wit: &[(&str, &str)], world: &str) -> Result<Vec<u8>> {
    let mut module =
        wat::parse_bytes(source).map_err(|error| wrong("the text can't be read", &error))?.into_owned();
    if module.starts_with(b"\0asm\x0d\0\x01\0") {
        return Ok(module);
    }
    // Bindings of a language may have put their world into the module already.
    let described = module.windows(14).any(|bytes| bytes == b"component-type");
    if !described {
        module = describe(module, wit, world)?;
    }
    ComponentEncoder::default()
        .validate(true)
        .module(&module)
        .and_then(|mut encoder| encoder.encode())
        .map_err(|error| wrong("no component can be made of it", &format!("{error:#}")))
}

fn wrong(what: &str, error: &dyn std::fmt::Display) -> Error {
    Error::invalid("source", format!("{what}: {error}"))
}

/// The core module with its world written into it.
fn describe(mut module: Vec<u8>, wit: &[(&str, &str)], world: &str) -> Result<Vec<u8>> {
    let mut resolve = Resolve::default();
    let mut last = None;
    for (name, text) in wit {
        let pushed = resolve.push_str(name, text);
        last = Some(pushed.map_err(|error| wrong(name, &format!("{error:#}")))?);
    }
    let package = last.ok_or_else(|| Error::invalid("wit", "no interface text is given"))?;
    let world = resolve
        .select_world(&[package], Some(world))
        .map_err(|error| wrong("the world is not there", &format!("{error:#}")))?;
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8)
        .map_err(|error| wrong("the module does not fit its world", &format!("{error:#}")))?;
    Ok(module)
}

/// As [`component`], for a world of `branchline:middleware`.
///
/// # Errors
/// As [`component`].
pub fn middleware(source: &[u8], world: &str) -> Result<Vec<u8>> {
    component(source, &[("middleware.wit", crate::WIT)], world)
}
