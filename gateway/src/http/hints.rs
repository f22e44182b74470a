//! What a client says of what is to come: how much a request will write, and how wide the fork is that it belongs to.

use branchline_core::{Error, Result};
use branchline_worker::Hints;
use http::HeaderMap;

/// Headers with the most that is believed of them; larger numbers count as that.
const EXPECTED_TOKENS: (&str, u32) = ("x-branchline-expected-tokens", 1 << 20);
const FORK_WIDTH: (&str, u32) = ("x-branchline-fork-width", 4096);

/// The hints of a request's headers.
///
/// # Errors
/// `InvalidArgument` naming the header that is no number from 1 on.
pub(super) fn hints(headers: &HeaderMap) -> Result<Hints> {
    Ok(Hints { expected_tokens: number(headers, EXPECTED_TOKENS)?, fork_width: number(headers, FORK_WIDTH)? })
}

fn number(headers: &HeaderMap, (name, most): (&'static str, u32)) -> Result<Option<u32>> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    let text = value.to_str().unwrap_or_default().trim();
    let digits = (1..=20).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse::<u64>().unwrap_or(u64::MAX) {
        number if digits && number > 0 => Ok(Some(u32::try_from(number).unwrap_or(most).min(most))),
        _ => {
            let message =
                format!("{name} is no whole number from 1 on; give one such as 64, or leave it out");
            Err(Error::invalid(name, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &'static str, value: &str) -> Result<Hints> {
        hints(&HeaderMap::from_iter([(
            http::HeaderName::from_static(name),
            http::HeaderValue::from_bytes(value.as_bytes()).expect("a value"),
        )]))
    }

    #[test]
    fn numbers_are_believed_up_to_a_bound_and_anything_else_is_refused_by_name() {
        for (name, most) in [EXPECTED_TOKENS, FORK_WIDTH] {
            let of = |value| read(name, value).map(|read| read.expected_tokens.or(read.fork_width));
            for (value, right) in
                [("1", 1), (" 64 ", 64), ("99999999999", most), ("18446744073709551616", most)]
            {
                assert_eq!(of(value).expect(value), Some(right), "{name}: {value}");
            }
            for value in ["", "0", "-1", "+1", "1.5", "1e3", "many", "é", "999999999999999999999"] {
                assert_eq!(of(value).expect_err(value).field.as_deref(), Some(name), "{value}");
            }
        }
        assert_eq!(hints(&HeaderMap::new()).expect("none"), Hints::default());
    }
}
