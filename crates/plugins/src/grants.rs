//! What a module may have beyond the usual, and what of it an operator lets anybody grant.
//!
//! Files and network reach a module only if the gateway's own options cover them: whoever may load modules is not for
//! that the owner of the machine.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use branchline_core::{Error, ErrorCode, Result};
use serde::{Deserialize, Serialize};

/// Folders or networks of one module at most.
const GRANTS_CAP: usize = 16;

/// What a module may have beyond the usual.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Grants {
    /// See and set secret headers: authorization, cookie, set-cookie, x-api-key, proxy-authorization.
    pub secrets: bool,
    /// Folders that it finds among WASI's.
    pub folders: Vec<Folder>,
    /// Where it may connect to by WASI's sockets, TCP only; names are not looked up.
    pub network: Vec<Peers>,
}

/// A folder of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Folder {
    /// Here; below one of `--wasm-grant-dirs`.
    pub path: PathBuf,
    /// What the module calls it, for example `/data`.
    pub at: String,
    /// Whether it may write there.
    #[serde(default)]
    pub write: bool,
}

/// Addresses with a port: `10.0.0.7:6379`, `10.0.0.0/8:6379`, `[fd00::/8]:*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Peers {
    network: IpAddr,
    bits: u8,
    /// None for any.
    port: Option<u16>,
}

/// What may be granted at all.
#[derive(Debug, Clone, Default)]
pub struct Grantable {
    /// Folders below these.
    pub folders: Vec<PathBuf>,
    /// Addresses within these.
    pub network: Vec<Peers>,
}

/// The address as a number from the left, and how many bits it has.
fn number(address: IpAddr) -> (u128, u8) {
    match address {
        IpAddr::V4(four) => (u128::from(u32::from(four)) << 96, 32),
        IpAddr::V6(six) => (u128::from(six), 128),
    }
}

impl Peers {
    fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let plain = bracketed.unwrap_or(host);
        let (address, bits) = match plain.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse().ok()?)),
            None => (plain, None),
        };
        let network: IpAddr = address.parse().ok()?;
        if network.is_ipv6() != bracketed.is_some() {
            return None;
        }
        let width = number(network).1;
        let port = match port {
            "*" => None,
            port => Some(port.parse().ok()?),
        };
        let bits = bits.unwrap_or(width);
        (bits <= width).then_some(Self { network, bits, port })
    }

    fn holds(&self, address: IpAddr) -> bool {
        let ((own, width), (other, of)) = (number(self.network), number(address));
        width == of && (self.bits == 0 || (own ^ other) >> (128 - u32::from(self.bits)) == 0)
    }

    /// Whether the address is one of these.
    pub(crate) fn has(&self, address: SocketAddr) -> bool {
        self.holds(address.ip().to_canonical()) && self.port.is_none_or(|port| port == address.port())
    }

    /// Whether all of `other` are among these.
    fn covers(&self, other: &Self) -> bool {
        let port = self.port.is_none() || self.port == other.port;
        port && self.bits <= other.bits && self.holds(other.network)
    }
}

impl TryFrom<String> for Peers {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Self, String> {
        Self::parse(&text).ok_or_else(|| {
            format!(
                "'{text}' is no address with a port; write 10.0.0.7:6379, 10.0.0.0/8:6379 or [fd00::/8]:*"
            )
        })
    }
}

impl std::str::FromStr for Peers {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        Self::try_from(text.to_owned())
    }
}

impl From<Peers> for String {
    fn from(peers: Peers) -> Self {
        let Peers { network, bits, port } = peers;
        let port = port.map_or("*".to_owned(), |port| port.to_string());
        let bits = if bits == number(network).1 { String::new() } else { format!("/{bits}") };
        match network {
            IpAddr::V4(four) => format!("{four}{bits}:{port}"),
            IpAddr::V6(six) => format!("[{six}{bits}]:{port}"),
        }
    }
}

impl Grants {
    /// Whether the network reaches an address.
    pub(crate) fn reaches(&self, address: SocketAddr) -> bool {
        self.network.iter().any(|peers| peers.has(address))
    }

    /// Whether everything said is possible.
    pub(crate) fn check(&self) -> Result<()> {
        if self.folders.len() > GRANTS_CAP || self.network.len() > GRANTS_CAP {
            let message =
                format!("`grants` has more than {GRANTS_CAP} folders or networks; grant wider ones");
            return Err(Error::invalid("grants", message));
        }
        let (mut names, all) = (Vec::new(), &self.folders);
        for Folder { at, .. } in all {
            if !at.starts_with('/') || at.len() > 256 || names.contains(&at) {
                let message =
                    format!("`at` is {at:?}; give each folder a name of its own that begins with /");
                return Err(Error::invalid("grants.folders.at", message));
            }
            names.push(at);
        }
        Ok(())
    }
}

impl Grantable {
    /// Everything, for whoever tries a module on a machine of their own.
    pub fn everything() -> Self {
        let network = ["0.0.0.0/0:*", "[::/0]:*"].into_iter().filter_map(Peers::parse);
        Self { folders: vec![PathBuf::from("/")], network: network.collect() }
    }

    /// The grants with their folders as they really are, links followed.
    ///
    /// # Errors
    /// `PermissionDenied` for what may not be granted, `NotFound` for a folder that is not there.
    pub(crate) fn allow(&self, mut grants: Grants) -> Result<Grants> {
        for folder in &mut grants.folders {
            let shown = folder.path.display().to_string();
            let missing = |_| {
                let message = format!("the folder {shown} does not exist or can't be read");
                Error::new(ErrorCode::NotFound, message).with_field("grants.folders")
            };
            let real = std::fs::canonicalize(&folder.path).map_err(missing)?;
            let below = |root: &PathBuf| std::fs::canonicalize(root).is_ok_and(|root| real.starts_with(root));
            if !real.is_dir() || !self.folders.iter().any(below) {
                let message = format!("{shown} is no folder below one of --wasm-grant-dirs; add one there");
                return Err(Error::new(ErrorCode::PermissionDenied, message).with_field("grants.folders"));
            }
            folder.path = real;
        }
        for peers in &grants.network {
            if !self.network.iter().any(|own| own.covers(peers)) {
                let shown = String::from(*peers);
                let message = format!("{shown} is not within --wasm-grant-network; add it there");
                return Err(Error::new(ErrorCode::PermissionDenied, message).with_field("grants.network"));
            }
        }
        Ok(grants)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peers(text: &str) -> Peers {
        text.parse().expect(text)
    }

    #[test]
    fn addresses_are_written_as_they_are_read_and_nonsense_is_refused() {
        for text in ["10.0.0.7:6379", "10.0.0.0/8:6379", "[fd00::/8]:*", "[::1]:53", "0.0.0.0/0:*"] {
            assert_eq!(String::from(peers(text)), text);
        }
        for text in [
            "",
            "10.0.0.7",
            "redis:6379",
            "10.0.0.0/33:1",
            "::1:53",
            "[10.0.0.1]:1",
            "10.0.0.1:x",
            "1.2.3.4:70000",
        ] {
            let error = text.parse::<Peers>().expect_err(text);
            assert!(error.contains(text) && error.contains("10.0.0.0/8:6379"), "{error}");
        }
    }

    #[test]
    fn a_network_has_its_addresses_on_its_ports_and_no_others() {
        for (own, address, has) in [
            ("10.0.0.0/8:6379", "10.255.0.1:6379", true),
            ("10.0.0.0/8:6379", "11.0.0.1:6379", false),
            ("10.0.0.0/8:6379", "10.0.0.1:6380", false),
            ("10.0.0.0/8:*", "[::ffff:10.0.0.1]:80", true),
            ("0.0.0.0/0:*", "[::1]:80", false),
            ("[fd00::/8]:*", "[fd12::1]:80", true),
            ("127.0.0.1:80", "127.0.0.2:80", false),
        ] {
            assert_eq!(peers(own).has(address.parse().expect("an address")), has, "{own} {address}");
        }
    }

    #[test]
    fn only_what_the_options_cover_can_be_granted() {
        let (root, other) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        let inner = root.path().join("data");
        std::fs::create_dir(&inner).expect("it makes one");
        std::os::unix::fs::symlink(other.path(), root.path().join("out")).expect("a link");
        let own = Grantable { folders: vec![root.path().into()], network: vec![peers("10.0.0.0/8:*")] };
        let folder = |path: PathBuf| Grants {
            folders: vec![Folder { path, at: "/data".to_owned(), write: false }],
            ..Grants::default()
        };
        assert!(own.allow(folder(inner.clone())).is_ok());
        for (path, code) in [
            (other.path().into(), ErrorCode::PermissionDenied),
            (root.path().join("out"), ErrorCode::PermissionDenied),
            (root.path().join("data/../../"), ErrorCode::PermissionDenied),
            (root.path().join("gone"), ErrorCode::NotFound),
        ] {
            assert_eq!(own.allow(folder(path)).expect_err("not allowed").code, code);
        }
        let network = |text| Grants { network: vec![peers(text)], ..Grants::default() };
        assert!(own.allow(network("10.1.0.0/16:80")).is_ok());
        for text in ["10.0.0.0/7:80", "192.168.0.1:80", "[::1]:80"] {
            let error = own.allow(network(text)).expect_err(text);
            assert_eq!(
                (error.code, error.field.as_deref()),
                (ErrorCode::PermissionDenied, Some("grants.network"))
            );
        }
        assert!(Grantable::default().allow(folder(inner)).is_err(), "nothing by default");
        assert!(Grantable::everything().allow(network("192.168.0.1:80")).is_ok());
    }

    #[test]
    fn folders_have_names_of_their_own() {
        let folder = |at: &str| Folder { path: "/".into(), at: at.to_owned(), write: false };
        let named = |names: &[&str]| Grants {
            folders: names.iter().map(|at| folder(at)).collect(),
            ..Grants::default()
        };
        assert!(named(&["/a", "/b"]).check().is_ok());
        for names in [&["a"][..], &["/a", "/a"], &[""]] {
            assert_eq!(named(names).check().expect_err("wrong").field.as_deref(), Some("grants.folders.at"));
        }
        assert!(named(&["/a"; 17]).check().is_err());
    }
}
