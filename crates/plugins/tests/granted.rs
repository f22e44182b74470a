//! What operators allow: files and network if options and grants both say so, and only signed modules if keys are set.

mod kit;

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use branchline_core::ErrorCode;
use branchline_plugins::{Grantable, PluginOptions, RequestAction, Signature, TrustedKey, Upload};
use kit::{Kit, guests, request, spec, wasi_guests};
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use serde_json::{Value, json};

/// A module's answer: status and body.
async fn answered(kit: &Kit, grants: Value, bytes: Vec<u8>) -> (u16, String) {
    let module = kit.load("m", json!({"grants": grants}), bytes).await;
    let called = module.on_request(request()).await;
    let Ok(RequestAction::Reject(reply)) = called.result else { panic!("it answers: {called:?}") };
    kit.plugins.remove(module.uuid()).await.expect("it is there");
    (reply.status, String::from_utf8(reply.body).expect("text"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_module_reads_a_granted_folder_and_no_other() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("hello.txt"), "good morning").expect("it writes");
    let grantable = Grantable { folders: vec![folder.path().into()], ..Grantable::default() };
    let kit = Kit::granting(None, grantable);
    assert_eq!(answered(&kit, json!({}), wasi_guests::reads_file(false)).await.0, 404, "no folder");
    let granted = |write: bool| json!({"folders": [{"path": folder.path(), "at": "/data", "write": write}]});
    let read = answered(&kit, granted(false), wasi_guests::reads_file(false)).await;
    assert_eq!(read, (200, "good morning".to_owned()));
    assert_eq!(answered(&kit, granted(false), wasi_guests::reads_file(true)).await.0, 403, "to write");
    assert_eq!(answered(&kit, granted(true), wasi_guests::reads_file(true)).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_module_connects_where_it_was_granted_and_nowhere_else() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    let network = vec!["127.0.0.0/8:*".parse().expect("a network")];
    let kit = Kit::granting(None, Grantable { network, ..Grantable::default() });
    assert_eq!(answered(&kit, json!({}), wasi_guests::connects(port)).await.0, 403, "nothing by default");
    let other = json!({"network": [format!("127.0.0.1:{}", port.wrapping_add(1))]});
    assert_eq!(answered(&kit, other, wasi_guests::connects(port)).await.0, 403, "another port");
    let granted = json!({"network": [format!("127.0.0.1:{port}")]});
    assert_eq!(answered(&kit, granted.clone(), wasi_guests::connects(port)).await.0, 200);
    drop(listener);
    assert_eq!(answered(&kit, granted, wasi_guests::connects(port)).await.0, 502, "nobody is there now");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_options_do_not_cover_is_refused_at_loading_changing_and_restoring() {
    let folder = tempfile::tempdir().expect("a folder");
    let kept = tempfile::tempdir().expect("a folder");
    let own = Grantable { folders: vec![folder.path().into()], ..Grantable::default() };
    let kit = Kit::granting(Some(kept.path()), own);
    let settings = json!({"grants": {"folders": [{"path": folder.path(), "at": "/data"}]}});
    let module = kit.load("m", settings, wasi_guests::reads_file(false)).await;
    let network = json!({"grants": {"network": ["10.0.0.1:80"]}});
    let changed = kit.plugins.change(module.uuid(), &network, None).await.expect_err("not covered");
    assert_eq!(
        (changed.code, changed.field.as_deref()),
        (ErrorCode::PermissionDenied, Some("grants.network"))
    );
    let loaded =
        kit.plugins.add(spec("n", &network), wasi_guests::connects(80)).await.expect_err("not covered");
    assert_eq!(loaded.code, ErrorCode::PermissionDenied);
    let narrower = Kit::kept_in(Some(kept.path()));
    let restored = narrower.plugins.restore_all().await.expect_err("no folder may be granted now");
    assert!(restored.message.contains("--wasm-grant-dirs"), "{restored}");
}

/// A key that is trusted, and what it says of some bytes.
fn signer() -> (TrustedKey, impl Fn(&[u8]) -> Signature) {
    let pair = Ed25519KeyPair::from_seed_unchecked(&[7; 32]).expect("a seed");
    let key = STANDARD.encode(pair.public_key()).parse().expect("a key");
    (key, move |bytes| Signature::from(STANDARD.encode(pair.sign(bytes))))
}

#[tokio::test(flavor = "multi_thread")]
async fn where_keys_are_trusted_only_signed_modules_are_loaded_replaced_and_restored() {
    let folder = tempfile::tempdir().expect("a folder");
    let (key, sign) = signer();
    let with = |dir: Option<&Path>, trusted: Vec<TrustedKey>| {
        Kit::with(PluginOptions { dir: dir.map(Into::into), trusted, ..Kit::options() })
    };
    let kit = with(Some(folder.path()), vec![key]);
    let (old, new) = (guests::rejects(403, "old"), guests::rejects(403, "new"));
    let signed = |bytes: &[u8], by: &[u8]| Upload { signature: Some(sign(by)), ..bytes.to_vec().into() };
    for upload in [Upload::from(old.clone()), signed(&old, &new)] {
        let error = kit.plugins.add(spec("m", &json!({})), upload).await.expect_err("not signed");
        assert_eq!((error.code, error.field.as_deref()), (ErrorCode::PermissionDenied, Some("signature")));
    }
    let (module, _) = kit.plugins.add(spec("m", &json!({})), signed(&old, &old)).await.expect("signed");
    let replaced = kit.plugins.change(module.uuid(), &json!({}), Some(new.clone().into())).await;
    assert_eq!(replaced.expect_err("not signed").code, ErrorCode::PermissionDenied);
    kit.plugins.change(module.uuid(), &json!({"order": 1}), None).await.expect("settings need no signature");
    kit.plugins.change(module.uuid(), &json!({}), Some(signed(&new, &new))).await.expect("signed");
    let again = with(Some(folder.path()), vec![key]);
    again.plugins.restore_all().await.expect("it is signed still");
    assert_eq!(again.plugins.chain().len(), 1);
    let stranger: TrustedKey = STANDARD.encode([1; 32]).parse().expect("a key");
    let error =
        with(Some(folder.path()), vec![stranger]).plugins.restore_all().await.expect_err("no key of it");
    assert!(error.message.contains("'m'") && error.message.contains("--wasm-trusted-keys"), "{error}");
    // What came unsigned while nobody asked does not come back once somebody does.
    let kept = tempfile::tempdir().expect("a folder");
    with(Some(kept.path()), Vec::new()).load("m", json!({}), old).await;
    assert!(with(Some(kept.path()), vec![key]).plugins.restore_all().await.is_err());
}
