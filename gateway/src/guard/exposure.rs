//! Whether an address may be served without keys.

use std::net::IpAddr;

use crate::config::Options;

/// Whether only this machine can reach `host`. A name other than `localhost` counts as reachable.
pub fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    match bare.parse::<IpAddr>() {
        Ok(IpAddr::V6(address)) => address.to_canonical().is_loopback(),
        Ok(address) => address.is_loopback(),
        Err(_) => bare.eq_ignore_ascii_case("localhost"),
    }
}

/// Refuses an address that others can reach when no key is set.
///
/// # Errors
/// A sentence that says what to do.
pub fn check_exposure(options: &Options) -> Result<(), String> {
    if options.is_keyed() || options.insecure || is_loopback(&options.host) {
        return Ok(());
    }
    Err(format!(
        "{} can be reached from other machines and no key is set; give --api-key or --api-key-file, \
         listen on 127.0.0.1, or say --insecure to serve anybody",
        options.host
    ))
}

/// The same for the operators' listener, where a client's key opens nothing; `has_admin` if a file of keys holds an admin's.
///
/// # Errors
/// A sentence that says what to do.
pub fn check_admin_exposure(options: &Options, has_admin: bool) -> Result<(), String> {
    let keyed = has_admin || !options.api_key.is_empty() || options.admin_api_key.is_some();
    let closed =
        options.admin_port.is_none() || keyed || options.insecure || is_loopback(&options.admin_host);
    match closed {
        true => Ok(()),
        false => Err(format!(
            "{} can be reached from other machines and no admin's key is set; give --api-key, --api-key-file or \
             --admin-api-key, listen on 127.0.0.1, or say --insecure to let anybody operate it",
            options.admin_host
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_addresses_and_localhost_are_private() {
        for host in ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LOCALHOST", "::ffff:127.0.0.1"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in
            ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", "127.0.0.1.example.org"]
        {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
