//! Files and network: nothing unless the operator's options and the module's grants both say so.

mod kit;

use branchline_core::ErrorCode;
use branchline_plugins::{Grantable, RequestAction};
use kit::{Kit, request, spec, wasi_guests};
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
