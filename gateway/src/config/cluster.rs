//! The options of Kubernetes discovery: their types, and what they mean together.

use branchline_discovery::{ModelFrom, Plan, Protocol, Query, Role, Selector, Timing};

use super::layers::{Fault, Layers};
use super::table::Options;
use super::value::{Shape, Value, not_listed};

/// Labels of pods, as `key=value` pairs; without any nothing is selected.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Labels(pub Selector);

impl Value for Labels {
    const SHAPE: Shape = Shape::List;

    fn parse(texts: &[String]) -> Result<Self, String> {
        Selector::parse(texts).map(Self)
    }
}

/// Where the model ids of discovered workers come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelIdFrom(pub ModelFrom);

impl Value for ModelIdFrom {
    const SHAPE: Shape = Shape::Text;

    fn parse(texts: &[String]) -> Result<Self, String> {
        String::parse(texts)?.parse().map(Self)
    }
}

/// What discovered workers speak; `None` to ask each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerProtocol(pub Option<Protocol>);

impl Value for WorkerProtocol {
    const SHAPE: Shape = Shape::Choice(|| &Protocol::NAMES);

    fn parse(texts: &[String]) -> Result<Self, String> {
        match String::parse(texts)?.as_str() {
            "auto" => Ok(Self(None)),
            text => Protocol::of(text)
                .map(|protocol| Self(Some(protocol)))
                .ok_or_else(|| not_listed(text, &Protocol::NAMES)),
        }
    }
}

/// What discovery is to do; `None` if it is off.
pub(crate) fn plan(options: &Options) -> Option<Plan> {
    if !options.service_discovery {
        return None;
    }
    let namespaces: Vec<Option<String>> = match &options.service_discovery_namespace {
        Some(names) if !names.0.is_empty() => names.0.iter().cloned().map(Some).collect(),
        _ => vec![None],
    };
    let selectors = [
        (&options.selector, Role::Regular),
        (&options.prefill_selector, Role::Prefill),
        (&options.decode_selector, Role::Decode),
    ];
    let mut queries = Vec::new();
    for namespace in namespaces {
        for (labels, role) in selectors.iter().filter(|(labels, _)| !labels.0.is_empty()) {
            queries.push(Query::pods(namespace.clone(), labels.0.clone(), *role));
        }
        for service in &options.service_discovery_service {
            queries.push(Query::service(namespace.clone(), service));
        }
    }
    Some(Plan {
        queries,
        port: options.service_discovery_port,
        model_from: options.model_id_from.as_ref().map(|from| from.0.clone()),
        bootstrap_annotation: options.bootstrap_port_annotation.clone(),
        protocol: options.service_discovery_protocol.0,
        timing: Timing { stale: options.service_discovery_stale_after, ..Timing::default() },
    })
}

/// What is wrong with them together.
pub(super) fn check(options: &Options, layers: &Layers) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut fault = |field: &str, text: &str| faults.push(Fault::new(layers.place(field), text));
    let selects = [
        ("selector", !options.selector.0.is_empty()),
        ("prefill_selector", !options.prefill_selector.0.is_empty()),
        ("decode_selector", !options.decode_selector.0.is_empty()),
        ("service_discovery_service", !options.service_discovery_service.is_empty()),
    ];
    match (options.service_discovery, selects.iter().find(|(_, given)| *given)) {
        (true, None) => fault(
            "service_discovery",
            "would find nothing; give --selector, --prefill-selector and --decode-selector, or --service-discovery-service",
        ),
        (false, Some((field, _))) => fault(field, "says nothing without --service-discovery; give both"),
        _ => {}
    }
    if options.service_discovery_port == 0 {
        fault("service_discovery_port", "0 is no port of a worker; give the one that workers listen on");
    }
    if options.service_discovery_stale_after.as_secs() < 3 {
        fault(
            "service_discovery_stale_after",
            "is below 3s, which an idle server can't keep; give at least 3s",
        );
    }
    let dns_label = |name: &String| {
        !name.is_empty()
            && name.len() <= 63
            && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
    };
    let namespaces = options.service_discovery_namespace.iter().flat_map(|names| &names.0);
    for (field, name) in namespaces
        .map(|name| ("service_discovery_namespace", name))
        .chain(options.service_discovery_service.iter().map(|name| ("service_discovery_service", name)))
    {
        if !dns_label(name) {
            fault(field, &format!("'{name}' is no name in Kubernetes; give small letters, digits and '-'"));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::super::{Outcome, resolve};
    use super::*;

    fn options(words: &[&str]) -> Result<Options, String> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        match resolve(&words, std::iter::empty()) {
            Outcome::Serve(options) => Ok(options),
            Outcome::Exit { text, .. } => Err(text),
        }
    }

    #[test]
    fn the_fields_flags_make_one_query_a_selector_and_namespace() {
        let given = options(&[
            "--service-discovery",
            "--selector",
            "app=w",
            "tier=gpu",
            "--prefill-selector",
            "role=p",
            "--decode-selector",
            "role=d",
            "--service-discovery-namespace",
            "a,b",
            "--service-discovery-service",
            "engines",
            "--model-id-from",
            "annotation:model",
            "--service-discovery-protocol=grpc",
        ])
        .unwrap();
        let plan = plan(&given).unwrap();
        assert_eq!(plan.queries.len(), 8);
        let shown: Vec<String> = plan.queries.iter().take(4).map(ToString::to_string).collect();
        assert_eq!(
            shown,
            [
                "pods app=w,tier=gpu in a",
                "pods role=p in a",
                "pods role=d in a",
                "endpointslices kubernetes.io/service-name=engines in a",
            ]
        );
        assert_eq!((plan.port, plan.bootstrap_annotation.as_str()), (80, "sglang.ai/bootstrap-port"));
        assert_eq!(plan.model_from, Some(ModelFrom::Annotation("model".to_owned())));
        assert_eq!(plan.protocol, Some(Protocol::Grpc));
    }

    #[test]
    fn without_a_namespace_the_whole_cluster_is_watched_and_without_the_switch_nothing() {
        let given = options(&["--service-discovery", "--selector", "app=w"]).unwrap();
        assert_eq!(plan(&given).unwrap().queries[0].to_string(), "pods app=w in all namespaces");
        assert!(plan(&options(&[]).unwrap()).is_none());
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_its_flag() {
        for (words, flag, word) in [
            (&["--service-discovery"][..], "--service-discovery:", "--selector"),
            (&["--selector", "a=b"][..], "--selector:", "without --service-discovery"),
            (&["--service-discovery", "--selector", "ab"][..], "--selector:", "key=value"),
            (&["--model-id-from", "name"][..], "--model-id-from:", "label:KEY"),
            (&["--service-discovery-port=0"][..], "--service-discovery-port:", "no port"),
            (&["--service-discovery-namespace", "A_b"][..], "--service-discovery-namespace:", "'A_b'"),
            (
                &["--service-discovery-protocol", "grp"][..],
                "--service-discovery-protocol:",
                "did you mean 'grpc'",
            ),
            (
                &["--service-discovery-stale-after", "1s"][..],
                "--service-discovery-stale-after:",
                "at least 3s",
            ),
        ] {
            let text = options(words).err().unwrap_or_default();
            assert!(text.contains(flag) && text.contains(word), "{words:?}: {text}");
        }
    }
}
