//! Workers behind names: the addresses of a name, or the servers that its SRV records list.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use branchline_core::{Error, Result};
use branchline_worker::WorkerSpec;
use hickory_resolver::TokioResolver;
use hickory_resolver::config::{NameServerConfig, ResolverConfig};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::RData;
use hickory_resolver::proto::rr::rdata::SRV;

/// Priority of a worker whose record has the best priority there is.
const BEST: i64 = 50;

/// What a name leads to, or why nobody knows.
type Answer<T> = std::result::Result<Vec<T>, String>;

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

impl Name {
    fn worker(&self, at: &dyn std::fmt::Display) -> WorkerSpec {
        WorkerSpec::new(format!("{}://{at}", self.scheme))
    }
}

impl Names {
    /// A resolver, if one of the names or the option needs it. `server` is `address` or `address:port`.
    pub(super) fn new(names: &[Name], server: Option<&str>) -> Result<Self> {
        let fault = |cause: &dyn std::fmt::Display| {
            let given = server.unwrap_or("the system's");
            let text =
                format!("worker_dns_server: {given} can't be asked: {cause}; give address or address:port");
            Error::invalid("worker_dns_server", text)
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
    ///
    /// # Errors
    /// `Internal` if the name can't be resolved.
    pub(super) async fn read(&self, name: &Name) -> Result<Vec<WorkerSpec>> {
        let fail = |cause: String| Error::internal(format!("{} can't be resolved: {cause}", name.text));
        let found = match &self.resolver {
            Some(resolver) if name.srv => return self.servers(resolver, name).await.map_err(fail),
            Some(resolver) if self.server => {
                let (host, port) = name.text.rsplit_once(':').unwrap_or((&name.text, ""));
                let port = port.parse().map_err(|_| fail("its port is no number".to_owned()))?;
                addresses(resolver, host.trim_matches(['[', ']']), port).await
            }
            _ => match tokio::net::lookup_host(name.text.as_str()).await {
                Ok(found) => Ok(found.collect()),
                Err(cause) => Err(cause.to_string()),
            },
        };
        Ok(found.map_err(fail)?.into_iter().map(|at| name.worker(&at)).collect())
    }

    /// Servers of SRV records: those of the lowest number get all requests while one of them is well, and more the
    /// higher their weight. Names that only the given name server knows are resolved here; certificates need names.
    async fn servers(&self, resolver: &TokioResolver, name: &Name) -> Answer<WorkerSpec> {
        let found = resolver.srv_lookup(name.text.as_str()).await.map_err(|cause| cause.to_string())?;
        let records: Vec<SRV> = found
            .answers()
            .iter()
            .filter_map(|record| match &record.data {
                RData::SRV(srv) => Some(srv.clone()),
                _ => None,
            })
            .collect();
        let heaviest = records.iter().map(|record| record.weight).max().unwrap_or_default().max(1);
        let mut workers = Vec::with_capacity(records.len());
        for record in records {
            let target = record.target.to_string();
            let target = target.trim_end_matches('.');
            // A single dot says that the service is decidedly not there.
            if target.is_empty() {
                continue;
            }
            let found = match self.server && matches!(name.scheme, "http" | "grpc") {
                true => {
                    let found = addresses(resolver, &record.target.to_string(), record.port).await?;
                    found.iter().map(|at| name.worker(at)).collect()
                }
                false => vec![name.worker(&format_args!("{target}:{}", record.port))],
            };
            let cost = f64::from(heaviest) / f64::from(record.weight.max(1));
            let priority = BEST - i64::from(record.priority);
            workers.extend(found.into_iter().map(|worker| WorkerSpec { priority, cost, ..worker }));
        }
        Ok(workers)
    }
}

async fn addresses(resolver: &TokioResolver, host: &str, port: u16) -> Answer<SocketAddr> {
    let found = resolver.lookup_ip(host).await.map_err(|cause| cause.to_string())?;
    Ok(found.iter().map(|ip| SocketAddr::new(ip, port)).collect())
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
