//! The workers that a pod or a slice stands for. Pure: an object and the plan in, members or a sentence out.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use branchline_core::Role;

use crate::object::{Endpoint, Metadata, Object, SlicePort};
use crate::plan::{ModelFrom, Plan, Query};

/// What a worker speaks: the scheme of its URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// The engine contract.
    Grpc,
    /// The engine contract over TLS.
    Grpcs,
    /// Another server's HTTP.
    Http,
    /// The same over TLS.
    Https,
}

impl Protocol {
    /// All spellings, with the one that asks the worker.
    pub const NAMES: [&'static str; 5] = ["auto", "grpc", "grpcs", "http", "https"];

    /// The URL's scheme.
    pub fn scheme(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::Grpcs => "grpcs",
            Self::Http => "http",
            Self::Https => "https",
        }
    }

    /// Of a scheme; `None` for none that exists.
    pub fn of(name: &str) -> Option<Self> {
        [Self::Grpc, Self::Grpcs, Self::Http, Self::Https].into_iter().find(|one| one.scheme() == name)
    }
}

/// Whether a worker takes requests, as Kubernetes sees it. Later ones win an address that two claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// It is being deleted: running requests may end.
    Leaving,
    /// It is there and must get no new request.
    Unready,
    /// It takes requests.
    Ready,
}

/// What else is said of a worker.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Traits {
    /// Its model's id.
    pub model: Option<String>,
    /// What it speaks.
    pub protocol: Option<Protocol>,
    /// Port of its bootstrap server.
    pub bootstrap_port: Option<u16>,
    /// Only workers of one group are paired.
    pub group: Option<String>,
    /// Data-parallel ranks.
    pub dp_size: Option<u32>,
    /// How it hands pages over.
    pub kv_connector: Option<String>,
    /// What runs there.
    pub runtime: Option<String>,
}

/// One worker that Kubernetes knows of.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// `ip:port`, IPv6 in brackets.
    pub address: String,
    /// Of the pod: another one at the same address is another worker.
    pub uid: String,
    /// Of the pod.
    pub namespace: String,
    /// Of the pod.
    pub name: String,
    /// What it is there for.
    pub role: Role,
    /// Whether it takes requests.
    pub phase: Phase,
    /// What can't change while it is connected.
    pub traits: Traits,
    /// Workers of the highest priority that are well get all requests; `None` for the usual one.
    pub priority: Option<i64>,
    /// How dear its time is.
    pub cost: Option<f64>,
    /// The pod's labels.
    pub labels: BTreeMap<String, String>,
    /// When the pod was made; sorts as text.
    pub born: String,
    /// How long Kubernetes lets it end.
    pub grace: Option<Duration>,
}

/// Annotations of ours start so.
const OURS: &str = "branchline.dev/";
/// The field's annotation with the ports of several workers in one pod.
const PORTS: &str = "smg.ai/worker-ports";

/// The workers that an object stands for.
///
/// # Errors
/// A sentence that names the annotation that can't be read and what to do.
pub(crate) fn members(object: &Object, query: &Query, plan: &Plan) -> Result<Vec<Member>, String> {
    if query.slices { of_slice(object, query, plan) } else { of_pod(object, query, plan) }
}

fn of_pod(pod: &Object, query: &Query, plan: &Plan) -> Result<Vec<Member>, String> {
    let (meta, status) = (&pod.metadata, &pod.status);
    // The server selects by labels already; one that tells of a pod that has left the selection is right, too.
    let over = matches!(status.phase.as_str(), "Failed" | "Succeeded");
    let Ok(ip) = status.pod_ip.parse::<IpAddr>() else { return Ok(Vec::new()) };
    if over || !query.selector.matches(&meta.labels) {
        return Ok(Vec::new());
    }
    let is_ready = status.conditions.iter().any(|one| one.kind == "Ready" && one.status == "True");
    let phase = match (&meta.deletion_timestamp, is_ready) {
        (Some(_), _) => Phase::Leaving,
        (None, true) => Phase::Ready,
        (None, false) => Phase::Unready,
    };
    let annotated = Annotated(meta);
    let base = annotated.member(query, plan, phase)?;
    let ports = match annotated.text("worker-ports").or_else(|| annotated.named(PORTS)) {
        Some(text) => text
            .split([',', ' '])
            .filter(|port| !port.is_empty())
            .map(|port| annotated.read("worker-ports", port, "ports with commas between them"))
            .collect::<Result<Vec<u16>, _>>()?,
        None => vec![plan.port],
    };
    let at = |port| Member { address: std::net::SocketAddr::new(ip, port).to_string(), ..base.clone() };
    Ok(ports.into_iter().map(at).collect())
}

fn of_slice(slice: &Object, query: &Query, plan: &Plan) -> Result<Vec<Member>, String> {
    let meta = &slice.metadata;
    let Some((port, protocol)) = slice_port(&slice.ports, plan.port) else { return Ok(Vec::new()) };
    if meta.deletion_timestamp.is_some() || !query.selector.matches(&meta.labels) {
        return Ok(Vec::new());
    }
    let mut base = Annotated(meta).member(query, plan, Phase::Unready)?;
    base.traits.protocol = base.traits.protocol.or(protocol);
    let of = |endpoint: &Endpoint| {
        // Kubernetes promises that further addresses of an endpoint are the same one.
        let ip = endpoint.addresses.first()?.parse::<IpAddr>().ok()?;
        let phase = match (endpoint.conditions.terminating, endpoint.conditions.ready) {
            (Some(true), _) => Phase::Leaving,
            (_, Some(false)) => Phase::Unready,
            _ => Phase::Ready,
        };
        let target = endpoint.target_ref.as_ref();
        Some(Member {
            address: std::net::SocketAddr::new(ip, port).to_string(),
            uid: target.map_or_else(String::new, |target| target.uid.clone()),
            name: target.map_or_else(|| meta.name.clone(), |target| target.name.clone()),
            phase,
            ..base.clone()
        })
    };
    Ok(slice.endpoints.iter().filter_map(of).collect())
}

/// The port with the plan's number, else one whose name says what it speaks, else the first.
fn slice_port(ports: &[SlicePort], wanted: u16) -> Option<(u16, Option<Protocol>)> {
    let named = |port: &&SlicePort| Protocol::of(&port.name).is_some();
    let port = ports
        .iter()
        .find(|port| port.port == Some(wanted))
        .or_else(|| ports.iter().find(named))
        .or_else(|| ports.first())?;
    let protocol = match port.app_protocol.as_str() {
        "kubernetes.io/h2c" => Some(Protocol::Grpc),
        other => Protocol::of(other).or_else(|| Protocol::of(&port.name)),
    };
    Some((port.port?, protocol))
}

/// An object's annotations, read with words for those that can't be.
struct Annotated<'a>(&'a Metadata);

impl<'a> Annotated<'a> {
    fn named(&self, name: &str) -> Option<&'a str> {
        self.0.annotations.get(name).map(|text| text.trim()).filter(|text| !text.is_empty())
    }

    fn text(&self, name: &str) -> Option<&'a str> {
        self.named(&format!("{OURS}{name}"))
    }

    fn read<T: FromStr + Checked>(&self, name: &str, text: &str, wanted: &str) -> Result<T, String> {
        let read = text.parse::<T>().ok().filter(Checked::is_good);
        read.ok_or_else(|| {
            let Metadata { namespace, name: pod, .. } = self.0;
            format!("annotation {name} of {namespace}/{pod} is '{text}'; give {wanted}, until then it is no worker")
        })
    }

    fn parsed<T: FromStr + Checked>(&self, name: &str, wanted: &str) -> Result<Option<T>, String> {
        self.text(name).map(|text| self.read(&format!("{OURS}{name}"), text, wanted)).transpose()
    }

    fn protocol(&self) -> Result<Option<Protocol>, String> {
        match self.text("protocol") {
            None | Some("auto") => Ok(None),
            Some(text) => Protocol::of(text).map(Some).ok_or_else(|| {
                let Metadata { namespace, name, .. } = self.0;
                let choices = Protocol::NAMES.join(", ");
                format!("annotation {OURS}protocol of {namespace}/{name} is '{text}'; give one of {choices}, until then it is no worker")
            }),
        }
    }

    fn member(&self, query: &Query, plan: &Plan, phase: Phase) -> Result<Member, String> {
        let meta = self.0;
        let field = plan.bootstrap_annotation.as_str();
        let bootstrap_port = match (self.text("bootstrap-port"), self.named(field)) {
            (Some(text), _) => Some(self.read(&format!("{OURS}bootstrap-port"), text, "a port")?),
            (None, Some(text)) => Some(self.read(field, text, "a port")?),
            (None, None) => None,
        };
        let model = match &plan.model_from {
            None => None,
            Some(ModelFrom::Namespace) => Some(meta.namespace.clone()),
            Some(ModelFrom::Label(key)) => meta.labels.get(key).cloned(),
            Some(ModelFrom::Annotation(key)) => meta.annotations.get(key).cloned(),
        };
        Ok(Member {
            address: String::new(),
            uid: meta.uid.clone(),
            namespace: meta.namespace.clone(),
            name: meta.name.clone(),
            role: query.role,
            phase,
            traits: Traits {
                model: model.filter(|model| !model.is_empty()),
                protocol: self.protocol()?.or(plan.protocol),
                bootstrap_port,
                group: self.text("group").map(str::to_owned),
                dp_size: self.parsed("dp-size", "a number from 1 to 1024")?,
                kv_connector: self.text("kv-connector").map(str::to_owned),
                runtime: self.text("runtime").map(str::to_owned),
            },
            priority: self.parsed("priority", "a whole number")?,
            cost: self.parsed("cost", "a number above 0")?,
            labels: meta.labels.clone(),
            born: meta.creation_timestamp.clone(),
            grace: meta.deletion_grace_period_seconds.map(Duration::from_secs),
        })
    }
}

/// Numbers within their bounds.
trait Checked {
    fn is_good(&self) -> bool {
        true
    }
}

impl Checked for i64 {}

impl Checked for u16 {
    fn is_good(&self) -> bool {
        *self != 0
    }
}

impl Checked for u32 {
    fn is_good(&self) -> bool {
        (1..=1024).contains(self)
    }
}

impl Checked for f64 {
    fn is_good(&self) -> bool {
        self.is_finite() && *self > 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Timing;

    fn plan(model_from: Option<&str>) -> Plan {
        Plan {
            queries: Vec::new(),
            port: 80,
            model_from: model_from.map(|text| text.parse().unwrap()),
            bootstrap_annotation: "sglang.ai/bootstrap-port".to_owned(),
            protocol: None,
            timing: Timing::default(),
        }
    }

    fn pod(more: &str) -> Object {
        let text = format!(
            r#"{{"metadata":{{"name":"p","namespace":"n","uid":"u","labels":{{"app":"w","m":"llama"}}{more}}},
                "status":{{"phase":"Running","podIP":"10.0.0.1","conditions":[{{"type":"Ready","status":"True"}}]}}}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    fn annotated(pairs: &str) -> Object {
        pod(&format!(r#","annotations":{{{pairs}}}"#))
    }

    fn query() -> Query {
        Query::pods(None, "app=w".parse().unwrap(), Role::Prefill)
    }

    fn one(object: &Object, model_from: Option<&str>) -> Member {
        let mut found = members(object, &query(), &plan(model_from)).unwrap();
        assert_eq!(found.len(), 1);
        found.remove(0)
    }

    #[test]
    fn a_ready_pod_is_a_worker_at_its_address_and_the_usual_port() {
        let member = one(&pod(""), None);
        assert_eq!(
            (member.address.as_str(), member.phase, member.role),
            ("10.0.0.1:80", Phase::Ready, Role::Prefill)
        );
        assert_eq!((member.namespace.as_str(), member.name.as_str(), member.uid.as_str()), ("n", "p", "u"));
        assert_eq!(member.labels["m"], "llama");
    }

    #[test]
    fn no_address_no_worker_and_neither_is_a_pod_that_is_over_or_another_ones() {
        let none = |change: &dyn Fn(&mut Object)| {
            let mut object = pod("");
            change(&mut object);
            members(&object, &query(), &plan(None)).unwrap().is_empty()
        };
        assert!(!none(&|_| {}));
        assert!(none(&|pod| pod.status.pod_ip.clear()));
        assert!(none(&|pod| "pending".clone_into(&mut pod.status.pod_ip)));
        assert!(none(&|pod| "Failed".clone_into(&mut pod.status.phase)));
        assert!(none(&|pod| "Succeeded".clone_into(&mut pod.status.phase)));
        assert!(none(&|pod| drop(pod.metadata.labels.insert("app".to_owned(), "other".to_owned()))));
    }

    #[test]
    fn deletion_comes_before_readiness_and_says_how_long_it_may_take() {
        let going = r#","deletionTimestamp":"2026-01-01T00:00:00Z","deletionGracePeriodSeconds":75"#;
        let member = one(&pod(going), None);
        assert_eq!((member.phase, member.grace), (Phase::Leaving, Some(Duration::from_secs(75))));
        let mut unready = pod("");
        "False".clone_into(&mut unready.status.conditions[0].status);
        assert_eq!(one(&unready, None).phase, Phase::Unready);
        unready.status.conditions.clear();
        assert_eq!(one(&unready, None).phase, Phase::Unready, "no condition is no readiness");
    }

    #[test]
    fn ipv6_addresses_stand_in_brackets() {
        let mut object = pod("");
        "fd00::7".clone_into(&mut object.status.pod_ip);
        assert_eq!(one(&object, None).address, "[fd00::7]:80");
    }

    #[test]
    fn a_pod_may_hold_several_workers() {
        for key in ["branchline.dev/worker-ports", "smg.ai/worker-ports"] {
            let found =
                members(&annotated(&format!(r#""{key}":"8000, 8001""#)), &query(), &plan(None)).unwrap();
            let addresses: Vec<_> = found.iter().map(|member| member.address.as_str()).collect();
            assert_eq!(addresses, ["10.0.0.1:8000", "10.0.0.1:8001"]);
        }
    }

    #[test]
    fn the_bootstrap_port_has_the_fields_annotation_and_ours_which_wins() {
        let port = |pairs: &str| one(&annotated(pairs), None).traits.bootstrap_port;
        assert_eq!(port(""), None);
        assert_eq!(port(r#""sglang.ai/bootstrap-port":"8998""#), Some(8998));
        assert_eq!(
            port(r#""sglang.ai/bootstrap-port":"8998","branchline.dev/bootstrap-port":" 9001 ""#),
            Some(9001)
        );
    }

    #[test]
    fn a_model_id_is_read_where_the_operator_says() {
        let object = annotated(r#""model":"org/llama""#);
        assert_eq!(one(&object, None).traits.model, None);
        for (from, right) in [
            ("namespace", Some("n")),
            ("label:m", Some("llama")),
            ("annotation:model", Some("org/llama")),
            ("label:none", None),
        ] {
            assert_eq!(one(&object, Some(from)).traits.model.as_deref(), right, "{from}");
        }
    }

    #[test]
    fn further_traits_are_read_and_what_cannot_be_is_told_with_the_pods_name() {
        let traits = one(
            &annotated(
                r#""branchline.dev/protocol":"grpc","branchline.dev/group":"g","branchline.dev/dp-size":"4",
                "branchline.dev/priority":"-3","branchline.dev/cost":"2.5","branchline.dev/runtime":"sglang""#,
            ),
            None,
        );
        assert_eq!((traits.priority, traits.cost), (Some(-3), Some(2.5)));
        assert_eq!((traits.traits.protocol, traits.traits.dp_size), (Some(Protocol::Grpc), Some(4)));
        assert_eq!(one(&annotated(r#""branchline.dev/protocol":"auto""#), None).traits.protocol, None);
        for (key, text) in [
            ("branchline.dev/bootstrap-port", "0"),
            ("sglang.ai/bootstrap-port", "http"),
            ("branchline.dev/worker-ports", "80,x"),
            ("smg.ai/worker-ports", "70000"),
            ("branchline.dev/protocol", "telepathy"),
            ("branchline.dev/cost", "0"),
            ("branchline.dev/priority", "high"),
            ("branchline.dev/dp-size", "0"),
        ] {
            let object = annotated(&format!(r#""{key}":"{text}""#));
            let words = members(&object, &query(), &plan(None)).unwrap_err();
            assert!(words.contains("n/p") && words.contains("no worker"), "{key}: {words}");
        }
    }

    fn slice(endpoints: &str, ports: &str) -> Vec<Member> {
        let text = format!(
            r#"{{"metadata":{{"name":"s-1","namespace":"n","labels":{{"kubernetes.io/service-name":"s"}}}},
                "endpoints":[{endpoints}],"ports":[{ports}]}}"#
        );
        members(&serde_json::from_str(&text).unwrap(), &Query::service(None, "s"), &plan(None)).unwrap()
    }

    #[test]
    fn endpoints_of_a_slice_are_workers_by_their_conditions() {
        let found = slice(
            r#"{"addresses":["10.0.0.1"],"conditions":{"ready":true},"targetRef":{"kind":"Pod","name":"p","uid":"u1"}},
               {"addresses":["10.0.0.2"],"conditions":{"ready":false}},
               {"addresses":["10.0.0.3"],"conditions":{"ready":false,"serving":true,"terminating":true}},
               {"addresses":["10.0.0.4"],"conditions":null},
               {"addresses":["name.example"],"conditions":{}}"#,
            r#"{"name":"http","port":8000}"#,
        );
        let shown: Vec<_> = found.iter().map(|one| (one.address.as_str(), one.phase)).collect();
        assert_eq!(
            shown,
            [
                ("10.0.0.1:8000", Phase::Ready),
                ("10.0.0.2:8000", Phase::Unready),
                ("10.0.0.3:8000", Phase::Leaving),
                ("10.0.0.4:8000", Phase::Ready),
            ]
        );
        assert_eq!((found[0].uid.as_str(), found[0].name.as_str()), ("u1", "p"));
        assert_eq!(found[0].traits.protocol, Some(Protocol::Http));
    }

    #[test]
    fn of_a_services_ports_the_usual_number_comes_first_and_then_a_name_that_says_what_it_speaks() {
        let port = |ports: &str| {
            slice(r#"{"addresses":["10.0.0.1"]}"#, ports)
                .into_iter()
                .map(|member| (member.address, member.traits.protocol))
                .next()
        };
        let at = |port: u16| format!("10.0.0.1:{port}");
        assert_eq!(
            port(
                r#"{"name":"metrics","port":9090},{"name":"x","port":80,"appProtocol":"kubernetes.io/h2c"}"#
            ),
            Some((at(80), Some(Protocol::Grpc)))
        );
        assert_eq!(
            port(r#"{"name":"metrics","port":9090},{"name":"grpc","port":50051}"#),
            Some((at(50051), Some(Protocol::Grpc)))
        );
        assert_eq!(port(r#"{"name":"","port":7000}"#), Some((at(7000), None)));
        assert_eq!(port(""), None, "a slice without ports has no workers");
    }
}
