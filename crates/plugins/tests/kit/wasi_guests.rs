//! Components that ask WASI for files and for the network, from text format.

use branchline_plugins::componentize;

use super::guests::text;

const IO: &str = r#"package wasi:io@0.2.0;
interface error { resource error; }
interface poll { resource pollable { block: func(); } }
interface streams { resource input-stream; resource output-stream; }"#;

const FILES: &str = r#"package wasi:filesystem@0.2.0;
interface types {
  type filesize = u64;
  enum error-code { access, would-block, already, bad-descriptor, busy, deadlock, quota, exist, file-too-large,
    illegal-byte-sequence, in-progress, interrupted, invalid, io, is-directory, loop, too-many-links, message-size,
    name-too-long, no-device, no-entry, no-lock, insufficient-memory, insufficient-space, not-directory, not-empty,
    not-recoverable, unsupported, no-tty, no-such-device, overflow, not-permitted, pipe, read-only, invalid-seek,
    text-file-busy, cross-device }
  flags path-flags { symlink-follow }
  flags open-flags { create, directory, exclusive, truncate }
  flags descriptor-flags { read, write, file-integrity-sync, data-integrity-sync, requested-write-sync, mutate-directory }
  resource descriptor {
    open-at: func(path-flags: path-flags, path: string, open-flags: open-flags, %flags: descriptor-flags)
      -> result<descriptor, error-code>;
    read: func(length: filesize, offset: filesize) -> result<tuple<list<u8>, bool>, error-code>;
  }
}
interface preopens { use types.{descriptor}; get-directories: func() -> list<tuple<descriptor, string>>; }"#;

const SOCKETS: &str = r#"package wasi:sockets@0.2.0;
interface network {
  resource network;
  enum error-code { unknown, access-denied, not-supported, invalid-argument, out-of-memory, timeout,
    concurrency-conflict, not-in-progress, would-block, invalid-state, new-socket-limit, address-not-bindable,
    address-in-use, remote-unreachable, connection-refused, connection-reset, connection-aborted, datagram-too-large,
    name-unresolvable, temporary-resolver-failure, permanent-resolver-failure }
  enum ip-address-family { ipv4, ipv6 }
  record ipv4-socket-address { port: u16, address: tuple<u8, u8, u8, u8> }
  record ipv6-socket-address { port: u16, flow-info: u32, address: tuple<u16, u16, u16, u16, u16, u16, u16, u16>, scope-id: u32 }
  variant ip-socket-address { ipv4(ipv4-socket-address), ipv6(ipv6-socket-address) }
}
interface instance-network { use network.{network}; instance-network: func() -> network; }
interface tcp {
  use wasi:io/streams@0.2.0.{input-stream, output-stream};
  use wasi:io/poll@0.2.0.{pollable};
  use network.{network, error-code, ip-socket-address};
  resource tcp-socket {
    start-connect: func(network: borrow<network>, remote-address: ip-socket-address) -> result<_, error-code>;
    finish-connect: func() -> result<tuple<input-stream, output-stream>, error-code>;
    subscribe: func() -> pollable;
  }
}
interface tcp-create-socket {
  use network.{error-code, ip-address-family};
  use tcp.{tcp-socket};
  create-tcp-socket: func(address-family: ip-address-family) -> result<tcp-socket, error-code>;
}"#;

/// Core code that answers with a status and the bytes at a place.
fn reply(status: u32, at: &str, length: &str) -> String {
    format!(
        "(i32.store (i32.const 0) (i32.const 2)) (i32.store (i32.const 4) (i32.const {status}))
         (i32.store (i32.const 8) (i32.const 0)) (i32.store (i32.const 12) (i32.const 0))
         (i32.store (i32.const 16) {at}) (i32.store (i32.const 20) {length})"
    )
}

fn empty(status: u32) -> String {
    reply(status, "(i32.const 0)", "(i32.const 0)") + "(call $forget) (return (i32.const 0))"
}

fn built(imports: &str, body: &str, package: (&str, &str), world_imports: &str) -> Vec<u8> {
    let wit = format!("{}\nworld one {{ {world_imports} export on-request; }}", branchline_plugins::WIT);
    let parts = format!(
        r#"(data (i32.const 2048) "hello.txt")
        (func (export "branchline:middleware/on-request@1.0.0#handle") (param $in i32) (result i32)
          {body} (call $forget) (i32.const 0))"#
    );
    let all = [("io.wit", IO), package, ("middleware.wit", wit.as_str())];
    componentize::component(text(imports, &parts).as_bytes(), &all, "one").expect("a component")
}

/// Answers with what `hello.txt` of its first folder holds: 404 without a folder, 403 if it can't open the file, to
/// write if `write`.
pub fn reads_file(write: bool) -> Vec<u8> {
    let imports = r#"
      (import "wasi:filesystem/preopens@0.2.0" "get-directories" (func $folders (param i32)))
      (import "wasi:filesystem/types@0.2.0" "[method]descriptor.open-at"
        (func $open (param i32 i32 i32 i32 i32 i32 i32)))
      (import "wasi:filesystem/types@0.2.0" "[method]descriptor.read" (func $read (param i32 i64 i64 i32)))"#;
    let flags = if write { 3 } else { 1 };
    let body = format!(
        "(call $folders (i32.const 1024))
         (if (i32.eqz (i32.load (i32.const 1028))) (then {}))
         (call $open (i32.load (i32.load (i32.const 1024))) (i32.const 0) (i32.const 2048) (i32.const 9) (i32.const 0)
           (i32.const {flags}) (i32.const 1040))
         (if (i32.load8_u (i32.const 1040)) (then {}))
         (call $read (i32.load (i32.const 1044)) (i64.const 1000) (i64.const 0) (i32.const 1056))
         (if (i32.load8_u (i32.const 1056)) (then {}))
         {}",
        empty(404),
        empty(403),
        empty(500),
        reply(200, "(i32.load (i32.const 1060))", "(i32.load (i32.const 1064))"),
    );
    let world = "import wasi:filesystem/types@0.2.0; import wasi:filesystem/preopens@0.2.0;";
    built(imports, &body, ("filesystem.wit", FILES), world)
}

/// Connects to a port of 127.0.0.1: 200 if it could, 403 if it may not, 502 if nobody is there.
pub fn connects(port: u16) -> Vec<u8> {
    let imports = r#"
      (import "wasi:sockets/tcp-create-socket@0.2.0" "create-tcp-socket" (func $make (param i32 i32)))
      (import "wasi:sockets/instance-network@0.2.0" "instance-network" (func $network (result i32)))
      (import "wasi:sockets/tcp@0.2.0" "[method]tcp-socket.start-connect"
        (func $start (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32)))
      (import "wasi:sockets/tcp@0.2.0" "[method]tcp-socket.finish-connect" (func $finish (param i32 i32)))
      (import "wasi:sockets/tcp@0.2.0" "[method]tcp-socket.subscribe" (func $subscribe (param i32) (result i32)))
      (import "wasi:io/poll@0.2.0" "[method]pollable.block" (func $block (param i32)))"#;
    let zeros = "(i32.const 0) ".repeat(6);
    let body = format!(
        "(call $make (i32.const 0) (i32.const 1024))
         (if (i32.load8_u (i32.const 1024)) (then {denied}))
         (call $start (i32.load (i32.const 1028)) (call $network) (i32.const 0) (i32.const {port})
           (i32.const 127) (i32.const 0) (i32.const 0) (i32.const 1) {zeros} (i32.const 1040))
         (if (i32.load8_u (i32.const 1040)) (then {denied}))
         (call $block (call $subscribe (i32.load (i32.const 1028))))
         (call $finish (i32.load (i32.const 1028)) (i32.const 1056))
         (if (i32.load8_u (i32.const 1056)) (then
           (if (i32.eq (i32.load8_u (i32.const 1060)) (i32.const 1)) (then {denied}))
           {nobody}))
         {}",
        reply(200, "(i32.const 0)", "(i32.const 0)"),
        denied = empty(403),
        nobody = empty(502),
    );
    let world = "import wasi:sockets/tcp@0.2.0; import wasi:sockets/instance-network@0.2.0;
                 import wasi:sockets/tcp-create-socket@0.2.0;";
    built(imports, &body, ("sockets.wit", SOCKETS), world)
}
