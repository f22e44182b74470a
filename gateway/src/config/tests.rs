//! Resolution across layers, and the pages made from the table.

use std::time::Duration;

use branchline_worker::PolicyKind;
use proptest::prelude::*;

use super::*;

fn with(arguments: &[&str], environment: &[(&str, &str)]) -> Outcome {
    let arguments: Vec<String> = arguments.iter().map(|text| (*text).to_owned()).collect();
    let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    resolve(&arguments, environment)
}

fn options(arguments: &[&str], environment: &[(&str, &str)]) -> Options {
    match with(arguments, environment) {
        Outcome::Serve(options) => options,
        Outcome::Exit { text, code } => panic!("exit {code}: {text}"),
    }
}

fn refusal(arguments: &[&str], environment: &[(&str, &str)]) -> String {
    match with(arguments, environment) {
        Outcome::Exit { text, code: 2 } => text,
        Outcome::Exit { text, code } => panic!("exit {code}: {text}"),
        Outcome::Serve(options) => panic!("accepted: {options:?}"),
    }
}

#[test]
fn every_default_of_the_table_is_a_value_of_its_type() {
    let options = options(&[], &[]);
    assert_eq!((options.host.as_str(), options.port), ("127.0.0.1", 30000));
    assert_eq!(options.policy, PolicyKind::CacheAware);
    assert_eq!(options.max_payload_size, Size(64 << 20));
    assert_eq!(options.first_token_timeout, None);
    assert!(options.worker_urls.is_empty() && options.api_key.is_empty() && !options.insecure);
}

#[test]
fn a_flag_wins_over_the_environment_over_the_file_over_the_default() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("router.toml");
    std::fs::write(
        &path,
        "port = 1\nlog_level = \"warn\"\nmax-connections = 7\nworker-urls = [\"http://a:1\"]\n",
    )
    .expect("written");
    let file = path.to_str().expect("a plain path");
    let environment =
        [("BRANCHLINE_ROUTER_PORT", "2"), ("BRANCHLINE_ROUTER_LOG_LEVEL", "error"), ("OTHER", "x")];
    let options = options(&["--config", file, "--port", "3"], &environment);
    assert_eq!(options.port, 3);
    assert_eq!(options.log_level.name(), "error");
    assert_eq!(options.max_connections, 7);
    assert_eq!(options.worker_urls, ["http://a:1"]);
    assert_eq!(options.drain_timeout, Duration::from_secs(30));
}

#[test]
fn lists_take_many_values_and_repeats() {
    let options = options(
        &["--worker-urls", "http://a:1", "grpc://b:2", "--worker-urls", "http://c:3", "--port", "1"],
        &[],
    );
    assert_eq!(options.worker_urls, ["http://a:1", "grpc://b:2", "http://c:3"]);
    let from_env =
        self::options(&[], &[("BRANCHLINE_ROUTER_WORKER_URLS", "http://a:1, http://b:2 http://c:3")]);
    assert_eq!(from_env.worker_urls.len(), 3);
}

#[test]
fn all_faults_are_reported_at_once_with_their_places_and_remedies() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("router.toml");
    std::fs::write(&path, "polcy = \"random\"\nhost = [\"a\", \"b\"]\n[nested]\nx = 1\n").expect("written");
    let file = path.to_str().expect("a plain path");
    let text = refusal(
        &[
            "--config",
            file,
            "--prot",
            "80",
            "--port",
            "eighty",
            "--policy",
            "round-robin",
            "--worker-urls",
            "ftp://a",
        ],
        &[("BRANCHLINE_ROUTER_LOG_JSON", "maybe"), ("BRANCHLINE_ROUTER_WORKER_URL", "http://a:1")],
    );
    for part in [
        "--prot: no option has this name; did you mean '--port'?",
        "--port: 'eighty' is not a port",
        "--policy: 'round-robin' is not one of the choices; did you mean 'round_robin'?",
        "BRANCHLINE_ROUTER_LOG_JSON: 'maybe' is neither true nor false",
        "BRANCHLINE_ROUTER_WORKER_URL: no option has this name; did you mean 'worker-urls'?",
        "router.toml: polcy: no option has this name; did you mean 'policy'?",
        "router.toml: host: takes one value, got 2",
        "router.toml: nested: is a table or nested list",
    ] {
        assert!(text.contains(part), "{part}\n---\n{text}");
    }
    assert!(text.lines().all(|line| line.starts_with("error: ")), "{text}");
}

#[test]
fn faults_of_readable_values_come_together_too() {
    let text = refusal(
        &[
            "--host",
            "0.0.0.0",
            "--worker-urls",
            "ftp://a",
            "nohost",
            "--prometheus-port",
            "30000",
            "--max-connections",
            "0",
        ],
        &[],
    );
    for part in [
        "--host: 0.0.0.0 can be reached",
        "'ftp://a'",
        "'nohost'",
        "--prometheus-port: 30000",
        "--max-connections: 0",
    ] {
        assert!(text.contains(part), "{part}\n---\n{text}");
    }
}

#[test]
fn an_open_address_needs_keys_or_the_word_insecure() {
    let text = refusal(&["--host", "0.0.0.0"], &[]);
    assert!(
        text.contains("--api-key") && text.contains("--insecure") && text.contains("127.0.0.1"),
        "{text}"
    );
    options(&["--host", "0.0.0.0", "--api-key", "k"], &[]);
    options(&["--host", "0.0.0.0", "--insecure"], &[]);
    options(&["--host", "localhost"], &[]);
    options(&["--host", "::1"], &[]);
}

#[test]
fn an_open_port_for_operators_needs_an_admins_key() {
    let open = ["--admin-port", "9000", "--admin-host", "0.0.0.0"];
    for key in [&[][..], &["--user-api-key", "k"]] {
        let text = refusal(&[&open, key].concat(), &[]);
        assert!(
            text.contains("--admin-host: 0.0.0.0 can be reached") && text.contains("--admin-api-key"),
            "{text}"
        );
    }
    for key in [["--api-key", "k"], ["--admin-api-key", "k"], ["--admin-host", "::1"]] {
        options(&[&open[..2], &key].concat(), &[]);
    }
    assert!(refusal(&["--admin-port", "30000"], &[]).contains("--admin-port: 30000 is the main port too"));
}

#[test]
fn files_of_tls_come_in_pairs() {
    for (alone, missing) in [
        ("--tls-cert-path", "--tls-key-path"),
        ("--tls-key-path", "--tls-cert-path"),
        ("--client-cert-path", "--client-key-path"),
        ("--client-key-path", "--client-cert-path"),
        ("--tls-client-ca-path", "--tls-cert-path"),
    ] {
        let text = refusal(&[alone, "x.pem"], &[]);
        assert!(text.starts_with(&format!("error: {alone}: ")) && text.contains(missing), "{text}");
    }
}

#[test]
fn a_key_file_adds_keys_and_an_unreadable_one_is_the_only_fault() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("keys");
    std::fs::write(&path, "user alpha\n").expect("written");
    let file = path.to_str().expect("a plain path");
    assert!(options(&["--host", "0.0.0.0", "--api-key-file", file], &[]).is_keyed());
    let open = ["--admin-port", "9000", "--admin-host", "0.0.0.0", "--api-key-file", file];
    assert!(refusal(&open, &[]).contains("no admin's key is set"));
    std::fs::write(&path, "user alpha\nbeta\n").expect("written");
    assert!(options(&open, &[]).is_keyed());
    let text = refusal(&["--host", "0.0.0.0", "--api-key-file", "/nonexistent"], &[]);
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("--api-key-file: /nonexistent can't be read"), "{text}");
}

#[test]
fn no_key_appears_in_a_fault_or_in_debug_output() {
    let shown = format!("{:?}", options(&["--api-key", "hunter2", "--worker-token", "hunter3"], &[]));
    assert!(!shown.contains("hunter"), "{shown}");
    let text = refusal(&["--api-key", "hunter 2"], &[]);
    assert!(!text.contains("hunter"), "{text}");
}

#[test]
fn a_switch_takes_no_word_after_it() {
    assert!(options(&["--insecure", "--log-json=false"], &[]).insecure);
    assert!(!options(&["--insecure=false"], &[]).insecure);
}

#[test]
fn an_unreadable_or_malformed_file_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("bad.toml");
    std::fs::write(&path, "port = = 3").expect("written");
    let text = refusal(&["--config", path.to_str().expect("a plain path")], &[]);
    assert!(text.contains("bad.toml: is not valid TOML") && text.contains("line 1"), "{text}");
    assert!(refusal(&["--config", "/nonexistent.toml"], &[]).contains("can't be read"));
}

#[test]
fn help_and_the_page_show_every_option_with_its_default() {
    let Outcome::Exit { text: help, code: 0 } = with(&["--help"], &[]) else {
        panic!("help ends the process well")
    };
    // Long lines are wrapped at blanks.
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    let page = render("options").expect("a page");
    for row in TABLE {
        assert!(help.contains(&format!("--{}", row.name())), "{}", row.field);
        assert!(page.contains(&format!("| `{}` | `{}` |", row.name(), row.env())), "{}", row.field);
        assert!(
            row.default.is_empty() || help.contains(&format!("[default: {}]", row.default)),
            "{}",
            row.field
        );
    }
}

#[test]
fn every_page_renders_and_no_other_does() {
    for page in PAGES {
        assert!(render(page).is_some_and(|text| text.len() > 200), "{page}");
    }
    assert!(render("nothing").is_none());
    let Outcome::Exit { code: 2, .. } = with(&["--print-reference", "nothing"], &[]) else {
        panic!("unknown page")
    };
}

#[test]
fn arguments_by_name_resolve_like_flags() {
    let given =
        vec![("port".to_owned(), vec!["9".to_owned()]), ("log_level".to_owned(), vec!["off".to_owned()])];
    let options = resolve_arguments(given, None, std::iter::empty()).expect("known names");
    assert_eq!(options.port, 9);
    let faults =
        resolve_arguments(vec![("prot".to_owned(), vec![])], None, std::iter::empty()).expect_err("unknown");
    assert_eq!(faults[0].place, "prot");
}

proptest! {
    /// Whatever is set where, the highest layer that sets a number wins.
    #[test]
    fn the_highest_layer_wins(file: Option<u16>, environment: Option<u16>, flag: Option<u16>) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("router.toml");
        std::fs::write(&path, file.map(|port| format!("port = {port}")).unwrap_or_default()).expect("written");
        let mut arguments = vec!["--config".to_owned(), path.display().to_string()];
        arguments.extend(flag.map(|port| format!("--port={port}")));
        let variables = environment.map(|port| ("BRANCHLINE_ROUTER_PORT".to_owned(), port.to_string()));
        let Outcome::Serve(options) = resolve(&arguments, variables.into_iter()) else { panic!("all are ports") };
        prop_assert_eq!(options.port, flag.or(environment).or(file).unwrap_or(30000));
    }

    #[test]
    fn any_command_line_ends_in_options_or_words(arguments in prop::collection::vec("(--)?[a-z=-]{0,12}", 0..6)) {
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        if let Outcome::Exit { text, .. } = with(&words, &[]) {
            prop_assert!(!text.is_empty());
        }
    }
}
