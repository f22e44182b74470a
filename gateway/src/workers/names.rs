//! Workers behind names: the addresses of a name, or the servers that its SRV records list.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use branchline_core::{Error, Result};
use branchline_worker::WorkerSpec;
use hickory_resolver::TokioResolver;
use hickory_resolver::config::{NameServerConfig, ResolverConfig};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::RData;

/// Priority of a worker whose record has the best priority there is.
const BEST: i64 = 50;

/// A name to ask, and what is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Name {
    /// Scheme of its workers.
    scheme: &'static str,
    /// `name:port`, or the name of SRV records.
    text: String,
    srv: bool,
}

/// Who is asked: the system, or one name server. SRV records are asked of the system's own name servers.
#[derive(Clone)]
pub(super) struct Names {
    resolver: Option<Arc<TokioResolver>>,
    server: bool,
}

impl Name {
    /// `dns://name:port`, `srv://name`, or with `http+`, `https+`, `grpc+`, `grpcs+` before them.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let (scheme, srv, rest) = match text.split_once("://") {
            Some(("dns" | "http+dns", rest)) => ("http", false, rest),
            Some(("https+dns", rest)) => ("https", false, rest),
            Some(("grpc+dns", rest)) => ("grpc", false, rest),
            Some(("grpcs+dns", rest)) => ("grpcs", false, rest),
            Some(("srv" | "http+srv", rest)) => ("http", true, rest),
            Some(("https+srv", rest)) => ("https", true, rest),
            Some(("grpc+srv", rest)) => ("grpc", true, rest),
            Some(("grpcs+srv", rest)) => ("grpcs", true, rest),
            _ => ("", false, ""),
        };
        let at = rest.parse::<http::uri::Authority>();
        // Records tell the port.
        let good = at.is_ok_and(|at| at.port_u16().is_some() != srv && !at.host().is_empty());
        match good && !scheme.is_empty() {
            true => Ok(Self { scheme, text: rest.to_owned(), srv }),
            false => Err(Error::invalid(
                "worker_dns",
                format!(
                    "'{text}' is not a name of workers; give dns://name:port or grpc+dns://name:port for its \
                     addresses, srv://name or grpc+srv://name for its SRV records"
                ),
            )),
        }
    }
}

impl Names {
    /// A resolver, if one of the names or the option needs it. `server` is `address` or `address:port`.
    pub(super) fn new(names: &[Name], server: Option<&str>) -> Result<Self> {
        let fault = |cause: &dyn std::fmt::Display| {
            Error::invalid("worker_dns_server", format!("worker_dns_server: {cause}; give address or address:port"))
        };
        let own = |text: &str| match text.parse::<SocketAddr>() {
            Ok(at) => Ok(at),
            Err(_) => text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, 53)).map_err(|cause| fault(&cause)),
        };
        let server = server.map(own).transpose()?;
        let builder = match server {
            Some(at) => {
                let mut config = NameServerConfig::udp_and_tcp(at.ip());
                config.connections.iter_mut().for_each(|connection| connection.port = at.port());
                let config = ResolverConfig::from_parts(None, Vec::new(), vec![config]);
                TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
            }
            None if names.iter().any(|name| name.srv) => {
                TokioResolver::builder_tokio().map_err(|cause| fault(&cause))?
            }
            None => return Ok(Self { resolver: None, server: false }),
        };
        let resolver = builder.build().map_err(|cause| fault(&cause))?;
        Ok(Self { resolver: Some(Arc::new(resolver)), server: server.is_some() })
    }

    /// The workers behind a name now.
    pub(super) async fn read(&self, name: &Name) -> Result<Vec<WorkerSpec>> {
        let fail = |cause: &dyn std::fmt::Display| Error::internal(format!("{} can't be resolved: {cause}", name.text));
        let worker = |address: SocketAddr| WorkerSpec::new(format!("{}://{address}", name.scheme));
        let (resolver, rest) = match (&self.resolver, name.text.rsplit_once(':')) {
            (Some(resolver), None) if name.srv => {
                return self.servers(resolver, name).await.map_err(|cause| fail(&cause));
            }
            (Some(resolver), Some(rest)) if self.server => (resolver, rest),
            _ => {
                let found = tokio::net::lookup_host(name.text.as_str()).await;
                return Ok(found.map_err(|cause| fail(&cause))?.map(worker).collect());
            }
        };
        let (host, port) = rest;
        let port = port.parse().map_err(|cause| fail(&cause))?;
        let found = resolver.lookup_ip(host.trim_matches(['[', ']'])).await.map_err(|cause| fail(&cause))?;
        Ok(found.iter().map(|ip| worker(SocketAddr::new(ip, port))).collect())
    }

    /// Servers of SRV records: those of the lowest number get all requests while one of them is well, and more the
    /// higher their weight.
    async fn servers(&self, resolver: &TokioResolver, name: &Name) -> std::result::Result<Vec<WorkerSpec>, String> {
        let found = resolver.srv_lookup(name.text.as_str()).await.map_err(|cause| cause.to_string())?;
        let records: Vec<(u16, u16, u16, String)> = found
            .answers()
            .iter()
            .filter_map(|record| match &record.data {
                RData::SRV(srv) => Some((srv.priority, srv.weight, srv.port, srv.target.to_string())),
                _ => None,
            })
            .collect();
        let heaviest = records.iter().map(|(_, weight, ..)| *weight).max().unwrap_or_default().max(1);
        let server = |(priority, weight, port, target): (u16, u16, u16, String)| {
            let target = target.trim_end_matches('.');
            // A single dot says that the service is decidedly not there.
            (!target.is_empty()).then(|| WorkerSpec {
                priority: BEST - i64::from(priority),
                cost: f64::from(heaviest) / f64::from(weight.max(1)),
                ..WorkerSpec::new(format!("{}://{target}:{port}", name.scheme))
            })
        };
        Ok(records.into_iter().filter_map(server).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_what_its_workers_speak_and_whether_records_list_them() {
        let right = |text: &str| {
            let name = Name::parse(text).expect(text);
            (name.scheme, name.text, name.srv)
        };
        assert_eq!(right("dns://w.example:80"), ("http", "w.example:80".into(), false));
        assert_eq!(right("grpc+dns://w:9"), ("grpc", "w:9".into(), false));
        assert_eq!(right("srv://_http._tcp.w.example"), ("http", "_http._tcp.w.example".into(), true));
        assert_eq!(right("grpcs+srv://_grpc._tcp.w"), ("grpcs", "_grpc._tcp.w".into(), true));
        for text in ["w:80", "dns://w", "srv://w:1", "dns://", "srv://", "http://w:1", "ftp+srv://w"] {
            assert_eq!(Name::parse(text).unwrap_err().field.as_deref(), Some("worker_dns"), "{text}");
        }
    }

    #[tokio::test]
    async fn a_name_server_is_an_address_with_or_without_a_port() {
        for good in ["127.0.0.1", "127.0.0.1:5353", "::1", "[::1]:5353"] {
            assert!(Names::new(&[], Some(good)).is_ok_and(|names| names.server), "{good}");
        }
        let error = Names::new(&[], Some("ns.example")).err().expect("a name needs a name server itself");
        assert_eq!(error.field.as_deref(), Some("worker_dns_server"));
        assert!(Names::new(&[], None).is_ok_and(|names| names.resolver.is_none()), "nobody needs one");
    }
}
