//! Who a tenant is, what it may use a minute, and what becomes of that when policies change.

use std::time::Duration;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn headers(team: &str) -> HeaderMap {
    HeaderMap::from_iter([(HeaderName::from_static("x-team"), team.parse().expect("a header"))])
}

fn limited(requests: Option<f64>, tokens: Option<f64>) -> Policy {
    Policy { requests_per_minute: requests, tokens_per_minute: tokens, ..Policy::default() }
}

#[test]
fn a_tenant_is_told_by_header_then_key_and_is_remembered() {
    let tenants = Tenants::load(None, Some("X-Team")).expect("good");
    let key = KeyHash::from([7; 32]);
    let a = tenants.of(Some(key), &headers("a"));
    assert_eq!(&**a.name(), "header:a");
    assert!(Arc::ptr_eq(&a, &tenants.of(None, &headers("a"))));
    let keyed = tenants.of(Some(key), &HeaderMap::new());
    assert_eq!(&**keyed.name(), format!("auth:{}", "07".repeat(32)));
    let long = headers(&"x".repeat(NAME_BYTES + 1));
    assert!(Arc::ptr_eq(&keyed, &tenants.of(Some(key), &long)), "a name too long is none");
    assert_eq!(&**tenants.of(None, &headers("")).name(), "anonymous");
    let plain = Tenants::load(None, None).expect("good");
    assert_eq!(&**plain.of(None, &headers("a")).name(), "anonymous", "no header is believed unless named");
    let error = Tenants::load(None, Some("a b")).expect_err("no name");
    assert_eq!(error.field.as_deref(), Some("tenant_header"));
}

#[test]
fn allowances_fill_by_the_minute_and_say_when_to_come_back() {
    let (tenant, now) = (Tenant::new("t", limited(Some(6.0), Some(60.0))), Instant::now());
    for _ in 0..6 {
        tenant.take(1.0, now).expect("six requests");
    }
    let error = tenant.take(1.0, now).expect_err("a seventh");
    assert!(error.message.contains("requests a minute"), "{error}");
    assert!((9.0..=10.0).contains(&error.retry_after.expect("a wait").as_secs_f64()), "{error:?}");
    tenant.take(1.0, now + 11 * SECOND).expect("one has come back");
    tenant.settle(None, 100.0);
    let error = tenant.take(1.0, now + 30 * SECOND).expect_err("tokens are owed");
    assert!(error.message.contains("tokens a minute"), "{error}");
    let wait = error.retry_after.expect("a wait");
    assert!(tenant.take(1.0, now + 30 * SECOND + wait + SECOND).is_ok(), "the wait is long enough");
    assert!(tenant.take(1000.0, now + 600 * SECOND).is_ok(), "a huge one begins when all is there");
    tenant.settle(None, -1000.0);
    assert!(tenant.take(60.0, now + 600 * SECOND).is_ok(), "what was not used comes back");
}

#[test]
fn less_than_one_request_a_minute_is_one_in_some_minutes() {
    let (tenant, now) = (Tenant::new("t", limited(Some(0.5), None)), Instant::now());
    tenant.take(1.0, now).expect("the first");
    let wait = tenant.take(1.0, now).expect_err("a second").retry_after.expect("a wait");
    assert!((119.0..=121.0).contains(&wait.as_secs_f64()), "{wait:?}");
    tenant.take(1.0, now + wait + SECOND).expect("the wait is long enough");
}

#[test]
fn nobody_gets_a_higher_class_than_he_may() {
    let tenant = Tenant::new("t", Policy { priority: Class::Default, ..Policy::default() });
    for (asked, class) in [
        (Some("interactive"), Class::Default),
        (Some("system"), Class::Default),
        (Some("BULK"), Class::Bulk),
        (Some("urgent"), Class::Default),
        (None, Class::Default),
    ] {
        assert_eq!(tenant.class(asked), class, "{asked:?}");
    }
}

#[test]
fn a_changed_file_changes_limits_and_what_was_used_stays_used() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tenants.toml");
    let write = |text: &str| std::fs::write(&path, text).expect("written");
    write("[default]\nrequests_per_minute = 2\n");
    let tenants = Tenants::load(Some(&path), Some("x-team")).expect("good");
    let (a, now) = (tenants.of(None, &headers("a")), Instant::now());
    for _ in 0..2 {
        a.take(1.0, now).expect("two requests");
    }
    assert!(a.take(1.0, now).is_err());
    write("[default]\nrequests_per_minute = 3\n[tenants.\"header:b\"]\npriority = \"bulk\"\n");
    tenants.read_again().expect("good");
    a.take(1.0, now).expect("one more than before");
    assert!(a.take(1.0, now).is_err(), "no new minute begins with a new file");
    assert_eq!(tenants.of(None, &headers("b")).class(None), Class::Bulk);
    write("[default]\nweight = 0\n");
    assert_eq!(tenants.read_again().expect_err("bad").field.as_deref(), Some("tenant_file"));
    assert_eq!(tenants.of(None, &headers("b")).class(None), Class::Bulk, "the last good one stays");
    write("");
    tenants.read_again().expect("good");
    for _ in 0..9 {
        a.take(1.0, now).expect("nothing is limited");
    }
}

#[test]
fn models_have_limits_of_their_own_that_survive_a_changed_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tenants.toml");
    let write = |text: &str| std::fs::write(&path, text).expect("written");
    let rule = |id: &str, kind: &str, value: &str, limit: &str| {
        format!(
            "[[default.model_rules]]\nrule_id = \"{id}\"\nmatcher = {{ type = \"{kind}\", value = \"{value}\" }}\n{limit}\n"
        )
    };
    write(
        &(rule("large", "prefix", "large-", "requests_per_minute = 2")
            + &rule("one", "exact", "x", "tokens_per_minute = 60")),
    );
    let tenants = Tenants::load(Some(&path), Some("x-team")).expect("good");
    let (a, b, now) = (tenants.of(None, &headers("a")), tenants.of(None, &headers("b")), Instant::now());
    let large = a.take_model("large-1", 1.0, now).expect("the first").expect("a rule");
    a.take_model("large-2", 1.0, now).expect("the second, of the same rule");
    let error = a.take_model("large-1", 1.0, now).expect_err("a third");
    assert!(error.message.contains("2 requests a minute are allowed for model 'large-1'"), "{error}");
    assert!((29.0..=30.0).contains(&error.retry_after.expect("a wait").as_secs_f64()), "{error:?}");
    assert_eq!(a.take_model("small", 1.0, now).expect("no rule"), None);
    b.take_model("large-1", 1.0, now).expect("another tenant has its own");
    a.forgive(Some(&large), 1.0);
    a.take_model("large-1", 1.0, now).expect("what was forgiven");
    let one = a.take_model("x", 10.0, now).expect("a rule of tokens").expect("a rule");
    a.settle(Some(&one), 80.0);
    let error = a.take_model("x", 1.0, now).expect_err("owed");
    assert!(error.message.contains("60 tokens a minute"), "{error}");
    write(&rule("large", "exact", "large-1", "requests_per_minute = 3"));
    tenants.read_again().expect("good");
    a.take_model("large-1", 1.0, now).expect("one more than before");
    assert!(a.take_model("large-1", 1.0, now).is_err(), "what was used stays used");
    assert_eq!(a.take_model("large-2", 1.0, now).expect("no rule any more"), None);
    a.settle(Some(&one), 5.0);
}

#[test]
fn who_owes_is_not_forgotten_and_new_names_are_no_way_around_a_limit() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), "[default]\nrequests_per_minute = 1\n").expect("written");
    let policies = Policies::read(file.path()).expect("good");
    let mut known = Known { policies, ..Known::default() };
    let now = Instant::now();
    let mut ask = |name: &str| known.get(name.into(), 2).take(1.0, now);
    ask("a").expect("its first");
    ask("b").expect("its first");
    assert!(ask("a").is_err(), "it is remembered");
    ask("c").expect("the first of all others");
    assert!(ask("d").is_err(), "there is no room to tell it from c");
    known.tenants.clear();
    known.get("idle".into(), 2);
    known.get("a".into(), 2).take(1.0, now).expect("its first");
    known.get("b".into(), 2).take(1.0, now).expect("idle has made room");
    assert!(!known.tenants.contains_key("idle"));
}
