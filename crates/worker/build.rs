//! Generates the engine contract's messages, client and server without a system protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = "../../proto";
    let file = "branchline/engine/v1/engine.proto";
    println!("cargo:rerun-if-changed={root}/{file}");
    let descriptors = protox::compile([file], [root])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
