//! What is watched and how it is read: made once from an operator's options, then frozen.

use std::fmt::{self, Write as _};
use std::str::FromStr;
use std::time::Duration;

use crate::member::Protocol;
use crate::selector::{Selector, is_key};
use branchline_core::Role;

/// Everything that discovery needs to know.
#[derive(Debug, Clone)]
pub struct Plan {
    /// What is listed and watched, each by itself.
    pub queries: Vec<Query>,
    /// Port of workers that don't name their own.
    pub port: u16,
    /// Where a worker's model id comes from; `None` for what the worker says.
    pub model_from: Option<ModelFrom>,
    /// Annotation with the port of a prefill worker's bootstrap server, beside our own.
    pub bootstrap_annotation: String,
    /// What workers speak that don't say; `None` to ask them.
    pub protocol: Option<Protocol>,
    /// Deadlines and pauses.
    pub timing: Timing,
}

/// Deadlines and pauses.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Silence of a watch after which all is listed anew.
    pub stale: Duration,
    /// Longest wait for a list or for the head of a watch.
    pub answer: Duration,
    /// First and longest pause after a failure.
    pub pause: (Duration, Duration),
    /// How long after an empty list it is asked whether really all are gone.
    pub confirm: Duration,
    /// How often known and wanted workers are compared though nothing was heard.
    pub level: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            stale: Duration::from_secs(45),
            answer: Duration::from_secs(10),
            pause: (Duration::from_millis(200), Duration::from_secs(2)),
            confirm: Duration::from_secs(1),
            level: Duration::from_secs(5),
        }
    }
}

/// One list and watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Query {
    /// Of EndpointSlices instead of pods.
    pub slices: bool,
    /// `None` for the whole cluster.
    pub namespace: Option<String>,
    /// Labels that they have.
    pub selector: Selector,
    /// What their workers are there for.
    pub role: Role,
}

impl Query {
    /// Pods with these labels.
    pub fn pods(namespace: Option<String>, selector: Selector, role: Role) -> Self {
        Self { slices: false, namespace, selector, role }
    }

    /// The endpoints of a Service.
    pub fn service(namespace: Option<String>, name: &str) -> Self {
        let selector = Selector::of("kubernetes.io/service-name", name);
        Self { slices: true, namespace, selector, role: Role::Regular }
    }

    fn path(&self) -> String {
        let (group, plural) = match self.slices {
            true => ("apis/discovery.k8s.io/v1", "endpointslices"),
            false => ("api/v1", "pods"),
        };
        match &self.namespace {
            Some(namespace) => format!("/{group}/namespaces/{namespace}/{plural}"),
            None => format!("/{group}/{plural}"),
        }
    }

    /// Path and query of one page of the list; `next` is empty for the first.
    pub(crate) fn list(&self, next: &str) -> String {
        let mut uri =
            format!("{}?labelSelector={}&limit=500", self.path(), escape(&self.selector.to_string()));
        if !next.is_empty() {
            let _ = write!(uri, "&continue={}", escape(next));
        }
        uri
    }

    /// Path and query of the watch from a version on; the server is asked to end it after `seconds`.
    pub(crate) fn watch(&self, version: &str, seconds: u64) -> String {
        format!(
            "{}?labelSelector={}&watch=true&allowWatchBookmarks=true&resourceVersion={}&timeoutSeconds={seconds}",
            self.path(),
            escape(&self.selector.to_string()),
            escape(version),
        )
    }

    /// The rule that lets a service account do this.
    pub(crate) fn rule(&self) -> String {
        let (group, plural) = if self.slices { ("discovery.k8s.io", "endpointslices") } else { ("", "pods") };
        let (kind, place) = match &self.namespace {
            Some(namespace) => ("Role", format!("in namespace {namespace}")),
            None => {
                ("ClusterRole", "in the whole cluster (or give --service-discovery-namespace)".to_owned())
            }
        };
        format!(
            "a {kind} with apiGroups [\"{group}\"], resources [\"{plural}\"], verbs [\"list\", \"watch\"], bound to the router's service account {place}"
        )
    }
}

impl fmt::Display for Query {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.slices { "endpointslices" } else { "pods" };
        write!(f, "{what} {}", self.selector)?;
        match &self.namespace {
            Some(namespace) => write!(f, " in {namespace}"),
            None => f.write_str(" in all namespaces"),
        }
    }
}

/// Where a worker's model id is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelFrom {
    /// The namespace's name.
    Namespace,
    /// The value of a label.
    Label(String),
    /// The value of an annotation; unlike labels it may hold a slash.
    Annotation(String),
}

impl FromStr for ModelFrom {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "namespace" => Ok(Self::Namespace),
            Some(("label", key)) if is_key(key) => Ok(Self::Label(key.to_owned())),
            Some(("annotation", key)) if is_key(key) => Ok(Self::Annotation(key.to_owned())),
            _ => Err(format!(
                "'{text}' is no source of model ids; give namespace, label:KEY or annotation:KEY"
            )),
        }
    }
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(char::from(byte)),
            _ => {
                let _ = write!(out, "%{byte:02X}");
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_name_the_kind_the_namespace_and_the_labels() {
        let pods = Query::pods(Some("gpu".to_owned()), "app=w,a/b=c".parse().unwrap(), Role::Regular);
        assert_eq!(pods.list(""), "/api/v1/namespaces/gpu/pods?labelSelector=a%2Fb%3Dc%2Capp%3Dw&limit=500");
        assert!(pods.list("x/y=").ends_with("&continue=x%2Fy%3D"));
        let watch = pods.watch("7", 30);
        assert!(
            watch.contains("&resourceVersion=7&timeoutSeconds=30")
                && watch.contains("allowWatchBookmarks=true")
        );
        let slices = Query::service(None, "engines");
        assert!(slices.list("").starts_with(
            "/apis/discovery.k8s.io/v1/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3Dengines"
        ));
    }

    #[test]
    fn the_missing_rule_is_told_for_the_scope_that_is_asked() {
        let one = Query::pods(Some("gpu".to_owned()), Selector::default(), Role::Regular).rule();
        assert!(
            one.contains("a Role ") && one.contains(r#"resources ["pods"]"#) && one.contains("gpu"),
            "{one}"
        );
        let all = Query::service(None, "s").rule();
        assert!(all.contains("ClusterRole") && all.contains("discovery.k8s.io"), "{all}");
    }

    #[test]
    fn a_model_id_comes_from_one_of_three_places() {
        assert_eq!("namespace".parse(), Ok(ModelFrom::Namespace));
        assert_eq!("label:a/model".parse(), Ok(ModelFrom::Label("a/model".to_owned())));
        assert_eq!("annotation:m".parse(), Ok(ModelFrom::Annotation("m".to_owned())));
        for text in ["", "label", "label:", "label:a b", "name:x", "namespace:x"] {
            assert!(text.parse::<ModelFrom>().is_err(), "{text}");
        }
    }
}
