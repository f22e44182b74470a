//! Pods and EndpointSlices as far as discovery reads them; all else of an object is skipped unread.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};

/// One pod or slice; the fields of the other kind stay empty.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Object {
    pub(crate) metadata: Metadata,
    #[serde(deserialize_with = "or_default")]
    pub(crate) status: PodStatus,
    #[serde(deserialize_with = "or_default")]
    pub(crate) endpoints: Vec<Endpoint>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) ports: Vec<SlicePort>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Metadata {
    pub(crate) name: String,
    pub(crate) namespace: String,
    #[serde(deserialize_with = "or_default")]
    pub(crate) uid: String,
    #[serde(deserialize_with = "or_default")]
    pub(crate) resource_version: String,
    #[serde(deserialize_with = "or_default")]
    pub(crate) labels: BTreeMap<String, String>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) annotations: BTreeMap<String, String>,
    /// RFC 3339 in UTC, so that texts sort as times do.
    #[serde(deserialize_with = "or_default")]
    pub(crate) creation_timestamp: String,
    pub(crate) deletion_timestamp: Option<String>,
    /// Seconds.
    pub(crate) deletion_grace_period_seconds: Option<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PodStatus {
    #[serde(deserialize_with = "or_default")]
    pub(crate) phase: String,
    #[serde(rename = "podIP", deserialize_with = "or_default")]
    pub(crate) pod_ip: String,
    #[serde(deserialize_with = "or_default")]
    pub(crate) conditions: Vec<Condition>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Condition {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) status: String,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Endpoint {
    #[serde(deserialize_with = "or_default")]
    pub(crate) addresses: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) conditions: Conditions,
    pub(crate) target_ref: Option<Target>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Conditions {
    /// Absent means unknown, which counts as ready.
    pub(crate) ready: Option<bool>,
    pub(crate) terminating: Option<bool>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Target {
    pub(crate) name: String,
    #[serde(deserialize_with = "or_default")]
    pub(crate) uid: String,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct SlicePort {
    #[serde(deserialize_with = "or_default")]
    pub(crate) name: String,
    pub(crate) port: Option<u16>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) app_protocol: String,
}

/// One page of a list.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct List {
    pub(crate) metadata: ListMetadata,
    #[serde(deserialize_with = "or_default")]
    pub(crate) items: Vec<Object>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ListMetadata {
    #[serde(deserialize_with = "or_default")]
    pub(crate) resource_version: String,
    #[serde(rename = "continue", deserialize_with = "or_default")]
    pub(crate) next: String,
}

/// One line of a watch.
#[derive(Debug)]
pub(crate) enum Event {
    /// ADDED or MODIFIED: the object is so now.
    Is(Box<Object>),
    /// DELETED.
    Gone(Box<Object>),
    /// Nothing changed up to this version.
    Bookmark(String),
    /// The server ends the watch, with its code and words.
    Error(u16, String),
}

impl Event {
    /// Reads a line; `None` for kinds of events that do not exist yet.
    pub(crate) fn parse(line: &str) -> serde_json::Result<Option<Self>> {
        #[derive(Deserialize)]
        struct Line<'a> {
            #[serde(rename = "type")]
            kind: &'a str,
            #[serde(borrow)]
            object: &'a serde_json::value::RawValue,
        }
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Status {
            code: u16,
            message: String,
        }
        let line: Line<'_> = serde_json::from_str(line)?;
        let object = || serde_json::from_str::<Object>(line.object.get());
        Ok(Some(match line.kind {
            "ADDED" | "MODIFIED" => Self::Is(Box::new(object()?)),
            "DELETED" => Self::Gone(Box::new(object()?)),
            "BOOKMARK" => Self::Bookmark(object()?.metadata.resource_version),
            "ERROR" => {
                let status: Status = serde_json::from_str(line.object.get())?;
                Self::Error(status.code, status.message)
            }
            _ => return Ok(None),
        }))
    }
}

/// Go writes `null` for what is empty.
fn or_default<'de, D, T>(from: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Option::<T>::deserialize(from).map(Option::unwrap_or_default)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nulls_read_as_empty() {
        let pod = r#"{"metadata":{"name":"p","namespace":"n","labels":null,"annotations":null,"uid":null},
            "spec":{"containers":[{}]},"status":{"podIP":null,"conditions":null,"phase":null}}"#;
        let pod: Object = serde_json::from_str(pod).unwrap();
        assert_eq!((pod.metadata.name.as_str(), pod.status.pod_ip.as_str()), ("p", ""));
        let list: List =
            serde_json::from_str(r#"{"metadata":{"resourceVersion":"7"},"items":null}"#).unwrap();
        assert_eq!((list.items.len(), list.metadata.resource_version.as_str()), (0, "7"));
        let slice: Object = serde_json::from_str(
            r#"{"metadata":{"name":"s","namespace":"n"},"endpoints":null,"ports":null}"#,
        )
        .unwrap();
        assert!(slice.endpoints.is_empty() && slice.ports.is_empty());
    }

    #[test]
    fn each_kind_of_line_is_told_apart() {
        let line =
            |kind: &str, object: &str| Event::parse(&format!(r#"{{"type":"{kind}","object":{object}}}"#));
        let pod = r#"{"metadata":{"name":"p","namespace":"n","resourceVersion":"9"}}"#;
        assert!(matches!(line("ADDED", pod), Ok(Some(Event::Is(_)))));
        assert!(matches!(line("MODIFIED", pod), Ok(Some(Event::Is(_)))));
        assert!(matches!(line("DELETED", pod), Ok(Some(Event::Gone(_)))));
        assert!(matches!(line("BOOKMARK", pod), Ok(Some(Event::Bookmark(version))) if version == "9"));
        let gone = r#"{"kind":"Status","code":410,"message":"too old"}"#;
        assert!(matches!(line("ERROR", gone), Ok(Some(Event::Error(410, text))) if text == "too old"));
        assert!(matches!(line("LATER", pod), Ok(None)));
        assert!(Event::parse("{").is_err() && Event::parse("[]").is_err());
    }
}
