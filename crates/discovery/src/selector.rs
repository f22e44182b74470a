//! Label selectors as users of the field write them: `key=value` pairs, all of which must hold.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Labels that an object must have.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Selector(BTreeMap<String, String>);

impl Selector {
    /// Whether it demands nothing.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether an object with these labels is meant.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|(key, value)| labels.get(key) == Some(value))
    }

    /// The selector of one label.
    pub(crate) fn of(key: &str, value: &str) -> Self {
        Self(BTreeMap::from([(key.to_owned(), value.to_owned())]))
    }

    /// Reads pairs, each text one or several with commas between them.
    ///
    /// # Errors
    /// A sentence that names the pair and says what would be accepted.
    pub fn parse(texts: &[String]) -> Result<Self, String> {
        let mut pairs = BTreeMap::new();
        for pair in
            texts.iter().flat_map(|text| text.split(',')).map(str::trim).filter(|pair| !pair.is_empty())
        {
            let (key, value) = pair
                .split_once("==")
                .or_else(|| pair.split_once('='))
                .ok_or_else(|| format!("'{pair}' is not a label; give key=value"))?;
            if !is_key(key) || !is_value(value) {
                return Err(format!(
                    "'{pair}' is not a label; a key is [prefix/]name and a value up to 63 letters, digits, '-', '_' and '.'"
                ));
            }
            if let Some(old) = pairs.insert(key.to_owned(), value.to_owned())
                && old != value
            {
                return Err(format!(
                    "'{key}' is both '{old}' and '{value}', which no object can be; give one"
                ));
            }
        }
        Ok(Self(pairs))
    }
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(&[text.to_owned()])
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (key, value)) in self.0.iter().enumerate() {
            write!(f, "{}{key}={value}", if at == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// Whether a text can be a label's or annotation's key.
pub(crate) fn is_key(key: &str) -> bool {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    let domain = |prefix: &str| {
        !prefix.is_empty()
            && prefix.len() <= 253
            && prefix.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.'))
    };
    !name.is_empty() && is_value(name) && prefix.is_none_or(domain)
}

fn is_value(value: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let outer = |byte: Option<&u8>| byte.is_none_or(u8::is_ascii_alphanumeric);
    let bytes = value.as_bytes();
    bytes.len() <= 63 && bytes.iter().copied().all(inner) && outer(bytes.first()) && outer(bytes.last())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn all_pairs_must_hold() {
        let selector = Selector::parse(&["app=w".to_owned(), "a.b/c==x, tier=".to_owned()]).unwrap();
        assert_eq!(selector.to_string(), "a.b/c=x,app=w,tier=");
        assert!(selector.matches(&labels(&[("app", "w"), ("a.b/c", "x"), ("tier", ""), ("more", "1")])));
        assert!(!selector.matches(&labels(&[("app", "w"), ("a.b/c", "x")])));
        assert!(!selector.matches(&labels(&[("app", "v"), ("a.b/c", "x"), ("tier", "")])));
        assert!(Selector::default().matches(&labels(&[])) && Selector::default().is_empty());
    }

    #[test]
    fn what_no_label_can_be_is_refused_with_its_text() {
        for text in ["app", "=w", "app=w w", "a/b/c=d", "/a=b", "-a=b", "app=é", "app=-"] {
            let error = text.parse::<Selector>().unwrap_err();
            assert!(error.contains(text), "{text}: {error}");
        }
        let error = Selector::parse(&["a=1".to_owned(), "a=2".to_owned()]).unwrap_err();
        assert!(error.contains("both '1' and '2'"), "{error}");
    }
}
