//! Addresses and keys as options: read where they are defined, in crates/plugins.

use branchline_plugins::{Peers, TrustedKey};

use super::value::{Shape, Value};

impl Value for Peers {
    const SHAPE: Shape = Shape::Text;

    fn parse(texts: &[String]) -> Result<Self, String> {
        String::parse(texts)?.parse()
    }
}

impl Value for TrustedKey {
    const SHAPE: Shape = Shape::Text;

    fn parse(texts: &[String]) -> Result<Self, String> {
        String::parse(texts)?.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_and_a_name_is_refused_with_the_form() {
        assert!(Peers::parse(&["10.0.0.0/8:6379".to_owned()]).is_ok());
        let refused = Peers::parse(&["redis:6379".to_owned()]).expect_err("a name");
        assert!(refused.contains("redis:6379") && refused.contains("10.0.0.7:6379"), "{refused}");
    }
    #[test]
    fn a_key_is_read_and_anything_else_is_refused_with_the_form() {
        let key = "A".repeat(43) + "=";
        assert!(TrustedKey::parse(&[key]).is_ok());
        let refused = TrustedKey::parse(&["key.pem".to_owned()]).expect_err("a file");
        assert!(refused.contains("key.pem") && refused.contains("base64"), "{refused}");
    }
}
