//! Real components from text format: each test says what the hook's core code is, the rest stands here.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part")]

use branchline_plugins::componentize;

/// Where the answer of a hook is written, and the data behind it.
const HEAD: &str = r#"
  (memory (export "memory") 2)
  (global $top (mut i32) (i32.const 65536))
  (func $alloc (export "cabi_realloc") (param $old i32) (param $olds i32) (param $align i32) (param $size i32) (result i32)
    (local $at i32)
    (local.set $at (i32.and
      (i32.add (global.get $top) (i32.sub (local.get $align) (i32.const 1)))
      (i32.xor (i32.sub (local.get $align) (i32.const 1)) (i32.const -1))))
    (global.set $top (i32.add (local.get $at) (local.get $size)))
    (block $done (loop $again
      (br_if $done (i32.ge_u (i32.mul (memory.size) (i32.const 65536)) (global.get $top)))
      (if (i32.eq (memory.grow (i32.const 16)) (i32.const -1)) (then unreachable))
      (br $again)))
    (if (local.get $olds) (then (memory.copy (local.get $at) (local.get $old) (local.get $olds))))
    (local.get $at))
  (func $forget (global.set $top (i32.const 65536)))
"#;

/// A core module with these parts.
pub fn text(imports: &str, parts: &str) -> String {
    format!("(module {imports} {HEAD} {parts})")
}

fn export(hook: &str, body: &str) -> String {
    format!(
        r#"(func (export "branchline:middleware/{hook}@1.0.0#handle") (param $in i32) (result i32) {body} (call $forget) (i32.const 0))"#
    )
}

/// A component of `branchline:middleware` with one hook; its answer stands at 0.
pub fn hook(world: &str, hook: &str, body: &str) -> Vec<u8> {
    with(world, "", &export(hook, body))
}

/// As [`hook`], from any parts.
pub fn with(world: &str, imports: &str, parts: &str) -> Vec<u8> {
    componentize::middleware(text(imports, parts).as_bytes(), world).expect("a component")
}

/// Sets what a module needs.
pub fn about(request_body: bool, response_body: bool) -> String {
    let (request, response) = (u8::from(request_body), u8::from(response_body));
    format!(
        r#"(data (i32.const 1024) "\0{request}\0{response}")
        (func (export "branchline:middleware/about@1.0.0#describe") (result i32) (i32.const 1024))"#
    )
}

/// Does nothing.
pub fn noop() -> Vec<u8> {
    hook("request-filter", "on-request", "(i32.store8 (i32.const 0) (i32.const 0))")
}

/// Asks for the body and does nothing.
pub fn reads_body() -> Vec<u8> {
    let handle = export("on-request", "(i32.store8 (i32.const 0) (i32.const 0))");
    with("body-filter", "", &format!("{} {handle}", about(true, false)))
}

fn store(at: u32, value: u32) -> String {
    format!("(i32.store (i32.const {at}) (i32.const {value}))")
}

/// Core code that writes a request-action that sets one header.
pub fn set_header(name: &str, value: &str) -> String {
    let (name_at, value_at, record) = (2048, 2048 + name.len() as u32, 1600);
    let words = [
        store(0, 1),
        store(40, record),
        store(44, 1),
        store(record, name_at),
        store(record + 4, name.len() as u32),
        store(record + 8, value_at),
        store(record + 12, value.len() as u32),
    ];
    words.concat()
}

fn escaped(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("\\{byte:02x}")).collect()
}

/// Text at 2048 and on, where [`set_header`] and others look for it.
pub fn data(bytes: &[u8]) -> String {
    format!(r#"(data (i32.const 2048) "{}")"#, escaped(bytes))
}

/// Sets a header of the request.
pub fn adds_header(name: &str, value: &[u8]) -> Vec<u8> {
    let blank = "x".repeat(value.len());
    let parts = export("on-request", &set_header(name, &blank));
    with("request-filter", "", &format!("{} {parts}", data(&[name.as_bytes(), value].concat())))
}

/// Answers itself, with a status and a body.
pub fn rejects(status: u16, body: &str) -> Vec<u8> {
    let words = [store(0, 2), store(4, status.into()), store(8, 0), store(12, 0), store(16, 2048)];
    let code = words.concat() + &store(20, body.len() as u32);
    with("request-filter", "", &format!("{} {}", data(body.as_bytes()), export("on-request", &code)))
}

/// Answers with a body that claims to be of this length, from address 0.
pub fn claims(length: u32) -> Vec<u8> {
    let words = [store(0, 2), store(4, 200), store(8, 0), store(12, 0), store(16, 0), store(20, length)];
    with("request-filter", "", &export("on-request", &words.concat()))
}

/// Replaces the body of the request.
pub fn writes_body(body: &str) -> Vec<u8> {
    let words = [store(0, 1), store(64, 1), store(68, 2048), store(72, body.len() as u32)];
    with(
        "request-filter",
        "",
        &format!("{} {}", data(body.as_bytes()), export("on-request", &words.concat())),
    )
}

/// Changes the path of the request.
pub fn writes_path(path: &str) -> Vec<u8> {
    let words = [store(0, 1), store(16, 1), store(20, 2048), store(24, path.len() as u32)];
    with(
        "request-filter",
        "",
        &format!("{} {}", data(path.as_bytes()), export("on-request", &words.concat())),
    )
}

/// Never ends.
pub fn spins() -> Vec<u8> {
    hook("request-filter", "on-request", "(loop $l (br $l))")
}

/// Grows its memory without end.
pub fn grows() -> Vec<u8> {
    hook("request-filter", "on-request", "(loop $l (drop (memory.grow (i32.const 16))) (br $l))")
}

/// Calls itself without end.
pub fn recurses() -> Vec<u8> {
    let deep = "(func $deep (param i32) (result i32) (i32.add (call $deep (i32.add (local.get 0) (i32.const 1))) (i32.const 1)))";
    with(
        "request-filter",
        "",
        &format!("{deep} {}", export("on-request", "(drop (call $deep (i32.const 0)))")),
    )
}

/// Traps at once.
pub fn traps() -> Vec<u8> {
    hook("request-filter", "on-request", "unreachable")
}

const CLOCKS: &str = r#"package wasi:io@0.2.0;
interface poll { resource pollable { block: func(); } }"#;
const MONOTONIC: &str = r#"package wasi:clocks@0.2.0;
interface monotonic-clock {
  use wasi:io/poll@0.2.0.{pollable};
  subscribe-duration: func(when: u64) -> pollable;
}"#;

/// Sleeps for a minute in a host call of WASI, where no instruction counts.
pub fn sleeps() -> Vec<u8> {
    let world = format!(
        "{}\nworld sleeper {{ import wasi:clocks/monotonic-clock@0.2.0; export on-request; }}",
        branchline_plugins::WIT
    );
    let imports = r#"
      (import "wasi:clocks/monotonic-clock@0.2.0" "subscribe-duration" (func $soon (param i64) (result i32)))
      (import "wasi:io/poll@0.2.0" "[method]pollable.block" (func $block (param i32)))"#;
    let body = "(call $block (call $soon (i64.const 60000000000))) (i32.store8 (i32.const 0) (i32.const 0))";
    let text = text(imports, &export("on-request", body));
    let wit = [("io.wit", CLOCKS), ("clocks.wit", MONOTONIC), ("middleware.wit", world.as_str())];
    componentize::component(text.as_bytes(), &wit, "sleeper").expect("a component")
}

/// Sets a header and the status of every answer.
pub fn marks_responses(status: u16, name: &str, value: &str) -> Vec<u8> {
    let (name_at, value_at) = (2048, 2048 + name.len() as u32);
    let words = [
        store(0, 1),
        format!("(i32.store8 (i32.const 4) (i32.const 1)) (i32.store16 (i32.const 6) (i32.const {status}))"),
        store(8, 1600),
        store(12, 1),
        store(1600, name_at),
        store(1604, name.len() as u32),
        store(1608, value_at),
        store(1612, value.len() as u32),
    ];
    response_hook("on-response", &words.concat(), &[name.as_bytes(), value.as_bytes()].concat(), false)
}

/// Answers instead of the worker once the worker has.
pub fn rejects_responses(hook: &str, status: u16, body: &str, reads: bool) -> Vec<u8> {
    let words = [store(0, 2), store(4, status.into()), store(8, 0), store(12, 0), store(16, 2048)];
    response_hook(hook, &(words.concat() + &store(20, body.len() as u32)), body.as_bytes(), reads)
}

/// Replaces the body of every answer.
pub fn writes_responses(body: &str) -> Vec<u8> {
    let words = [store(0, 1), store(32, 1), store(36, 2048), store(40, body.len() as u32)];
    response_hook("on-response", &words.concat(), body.as_bytes(), true)
}

/// Looks at answers and their bodies, and lets them pass.
pub fn reads_responses() -> Vec<u8> {
    response_hook("on-response", &store(0, 0), b"", true)
}

fn response_hook(hook: &str, code: &str, text: &[u8], reads: bool) -> Vec<u8> {
    let wit =
        format!("{}\nworld one {{ import host; export about; export {hook}; }}", branchline_plugins::WIT);
    let parts = format!("{} {} {}", about(false, reads), data(text), export(hook, code));
    componentize::component(self::text("", &parts).as_bytes(), &[("middleware.wit", &wit)], "one")
        .expect("a component")
}

/// Makes each event this one; at event number `stop_at` it ends the stream, with this event if `last`.
pub fn writes_events(data_text: &str, stop_at: u64, last: bool) -> Vec<u8> {
    // The request takes 84 bytes and is padded to 88; the event follows: name 12, data 8, index at 24.
    let record = [store(1600, 0), store(1612, 2048), store(1616, data_text.len() as u32)].concat();
    let answer = |case: u32, count: u32| [store(0, case), store(4, 1600), store(8, count)].concat();
    let body = format!(
        "{record} (if (i64.ge_u (i64.load (i32.add (local.get $in) (i32.const {EVENT_INDEX}))) (i64.const {stop_at})) (then {}) (else {}))",
        answer(2, u32::from(last)),
        answer(1, 1),
    );
    let parts = format!("{} {}", data(data_text.as_bytes()), export("on-stream-event", &body));
    with("stream-filter", "", &parts)
}

/// Offset of the event's index behind the request: 76 bytes of request, aligned to 8, then 24 of the event.
pub const EVENT_INDEX: u32 = 80 + 24;

/// Lets every event pass.
pub fn reads_events() -> Vec<u8> {
    hook("stream-filter", "on-stream-event", "(i32.store8 (i32.const 0) (i32.const 0))")
}

/// Traps at each event.
pub fn traps_on_events() -> Vec<u8> {
    hook("stream-filter", "on-stream-event", "unreachable")
}

/// Counts its calls in the store and rejects from the call after `free` on.
pub fn budget(free: u32) -> Vec<u8> {
    let imports = r#"(import "branchline:middleware/host@1.0.0" "kv-add" (func $add (param i32 i32 i64 i64) (result i64)))"#;
    let reject = [store(0, 2), store(4, 429), store(8, 0), store(12, 0), store(16, 0), store(20, 0)].concat();
    let body = format!(
        "(if (i64.gt_s (call $add (i32.const 2048) (i32.const 1) (i64.const 1) (i64.const 0)) (i64.const {free})) (then {reject}) (else {}))",
        store(0, 0)
    );
    with("request-filter", imports, &format!("{} {}", data(b"n"), export("on-request", &body)))
}

/// Picks the candidate at this place.
pub fn picks(position: u32) -> Vec<u8> {
    // route: id 8, model 12, tenant 12, prompt tokens 8 (at 32), candidates at 40; a candidate takes 48 bytes.
    let body = format!(
        "(i32.store (i32.const 0) (i32.const 3))
         (i32.store (i32.const 4) (i32.load (i32.add (i32.load (i32.add (local.get $in) (i32.const 40))) (i32.const {0}))))
         (i32.store (i32.const 8) (i32.load (i32.add (i32.load (i32.add (local.get $in) (i32.const 40))) (i32.const {1}))))",
        position * 48,
        position * 48 + 4
    );
    let wit = format!("{}\nworld one {{ import host; export on-route; }}", branchline_plugins::WIT);
    let parts = export_flat("on-route", &body);
    componentize::component(text("", &parts).as_bytes(), &[("middleware.wit", &wit)], "one")
        .expect("a component")
}

/// on-route has 11 flat parameters: the list of candidates is the last two.
fn export_flat(hook: &str, body: &str) -> String {
    let body = body.replace("(i32.load (i32.add (local.get $in) (i32.const 40)))", "(local.get $list)");
    format!(
        r#"(func (export "branchline:middleware/{hook}@1.0.0#handle")
          (param i32 i32) (param i32 i32 i32) (param i32 i32 i32) (param i64) (param $list i32) (param $count i32)
          (result i32) {body} (call $forget) (i32.const 0))"#
    )
}

/// A module of SGLang's gateway: sets a header of requests.
pub fn smg_adds_header(name: &str, value: &str) -> Vec<u8> {
    // modify-action: status 4, then set, add, remove, body; the variant's payload begins at 4.
    let (name_at, value_at) = (2048, 2048 + name.len() as u32);
    let words = [
        store(0, 2),
        store(4, 0),
        store(8, 1600),
        store(12, 1),
        store(1600, name_at),
        store(1604, name.len() as u32),
        store(1608, value_at),
        store(1612, value.len() as u32),
    ];
    smg("smg:gateway", &words.concat(), &[name.as_bytes(), value.as_bytes()].concat())
}

/// A module of SGLang's gateway: rejects with a status.
pub fn smg_rejects(status: u16) -> Vec<u8> {
    smg_of("smg:gateway", status)
}

/// The same under a name of the package.
pub fn smg_of(package: &str, status: u16) -> Vec<u8> {
    smg(package, &[store(0, 1), store(4, status.into())].concat(), b"")
}

fn smg(package: &str, code: &str, text: &[u8]) -> Vec<u8> {
    // Seven fields: five lists or strings of two, the id of two, the clock of one: 13 flat parameters.
    let parts = format!(
        r#"{} (func (export "{package}/middleware-on-request#on-request")
          (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i64) (result i32) {code} (call $forget) (i32.const 0))"#,
        data(text)
    );
    let named = branchline_plugins::SMG_WIT.replace("smg:gateway", package);
    let wit = [("smg.wit", named.as_str())];
    componentize::component(self::text("", &parts).as_bytes(), &wit, "smg-request").expect("a component")
}

/// A hook that traps, as part of a core module.
pub fn export_trap(hook: &str) -> String {
    export(hook, "unreachable")
}

/// A hook that lets everything pass, as part of a core module.
pub fn export_continue(hook: &str) -> String {
    export(hook, "(i32.store8 (i32.const 0) (i32.const 0))")
}

/// Answers with its configuration.
pub fn echoes_config() -> Vec<u8> {
    let imports = r#"(import "branchline:middleware/host@1.0.0" "config" (func $config (param i32)))"#;
    let head = [store(0, 2), store(4, 200), store(8, 0), store(12, 0)].concat();
    // The text's place and length are written where the reply's body is read from.
    let body = format!("{head} (call $config (i32.const 16))");
    with("request-filter", imports, &export("on-request", &body))
}

/// Calls every host function that leaves a trace, then answers with what the store had under `k`.
pub fn uses_host() -> Vec<u8> {
    let host = "branchline:middleware/host@1.0.0";
    let imports = [
        ("log", "(param i32 i32 i32)"),
        ("counter-add", "(param i32 i32 i32 i32 i64)"),
        ("gauge-set", "(param i32 i32 i32 i32 i64)"),
        ("histogram-observe", "(param i32 i32 i32 i32 f64)"),
        ("kv-set", "(param i32 i32 i32 i32 i64) (result i32)"),
        ("kv-get", "(param i32 i32 i32)"),
        ("kv-delete", "(param i32 i32)"),
        ("now-ms", "(result i64)"),
        ("monotonic-ns", "(result i64)"),
        ("random", "(param i32 i32)"),
    ]
    .map(|(name, types)| format!("(import \"{host}\" \"{name}\" (func ${name} {types}))"))
    .concat();
    // At 2048: "name", "label", "k", "value".
    let body = r#"
      (call $log (i32.const 2) (i32.const 2048) (i32.const 4))
      (call $counter-add (i32.const 2048) (i32.const 4) (i32.const 2052) (i32.const 5) (i64.const 3))
      (call $gauge-set (i32.const 2048) (i32.const 4) (i32.const 2052) (i32.const 5) (i64.const -7))
      (call $histogram-observe (i32.const 2048) (i32.const 4) (i32.const 2052) (i32.const 5) (f64.const 0.25))
      (if (i32.eqz (call $kv-set (i32.const 2057) (i32.const 1) (i32.const 2058) (i32.const 5) (i64.const 60000)))
        (then unreachable))
      (call $kv-get (i32.const 2057) (i32.const 1) (i32.const 1200))
      (if (i32.eqz (i32.load8_u (i32.const 1200))) (then unreachable))
      (call $kv-delete (i32.const 2057) (i32.const 1))
      (if (i64.lt_u (call $now-ms) (i64.const 1700000000000)) (then unreachable))
      (if (i64.gt_u (call $monotonic-ns) (call $monotonic-ns)) (then unreachable))
      (call $random (i32.const 9000) (i32.const 1240))
      (if (i32.ne (i32.load (i32.const 1244)) (i32.const 4096)) (then unreachable))
      (i32.store (i32.const 0) (i32.const 2))
      (i32.store (i32.const 4) (i32.const 200))
      (i32.store (i32.const 8) (i32.const 0))
      (i32.store (i32.const 12) (i32.const 0))
      (i32.store (i32.const 16) (i32.load (i32.const 1204)))
      (i32.store (i32.const 20) (i32.load (i32.const 1208)))"#;
    let parts = format!("{} {}", data(b"namelabelkvalue"), export("on-request", body));
    with("request-filter", &imports, &parts)
}

/// Logs the same line this many times.
pub fn chatters(lines: u32) -> Vec<u8> {
    let imports = r#"(import "branchline:middleware/host@1.0.0" "log" (func $log (param i32 i32 i32)))"#;
    let body = format!(
        "(local $n i32) (loop $again
           (call $log (i32.const 1) (i32.const 2048) (i32.const 2))
           (local.set $n (i32.add (local.get $n) (i32.const 1)))
           (br_if $again (i32.lt_u (local.get $n) (i32.const {lines}))))
         {}",
        store(0, 0)
    );
    with("request-filter", imports, &format!("{} {}", data(b"hi"), export("on-request", &body)))
}
