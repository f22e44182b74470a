//! Messages, client and server stubs of `branchline.engine.v1`, generated from proto/. No code of ours.
#![allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::too_many_lines)]

tonic::include_proto!("branchline.engine.v1");
