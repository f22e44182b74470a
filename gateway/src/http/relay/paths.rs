//! Which paths without a handler here may reach HTTP workers: those of inference APIs, never those of operators.

const KNOWN: [&str; 11] = [
    "/generate",
    "/tokenize",
    "/detokenize",
    "/rerank",
    "/v2/rerank",
    "/score",
    "/classify",
    "/encode",
    "/embeddings",
    "/embed",
    "/pooling",
];

/// Paths below `/v1/` by which servers change what they serve.
const OPERATORS: [&str; 2] = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"];

/// Whether a path may pass. One that a worker could read as another (escapes, `..`, empty parts) may not.
pub(super) fn may_pass(path: &str) -> bool {
    let plain = !path.contains(['%', '\\', ';']);
    let rest = path.strip_prefix('/').unwrap_or_default();
    let parts =
        rest.strip_suffix('/').unwrap_or(rest).split('/').all(|part| !matches!(part, "" | "." | ".."));
    let path = path.strip_suffix('/').unwrap_or(path);
    plain && parts && !OPERATORS.contains(&path) && (path.starts_with("/v1/") || KNOWN.contains(&path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_inference_pass_and_all_others_do_not() {
        for path in ["/v1/embeddings", "/v1/audio/speech", "/rerank", "/v2/rerank", "/encode", "/classify/"] {
            assert!(may_pass(path), "{path}");
        }
        for path in [
            "/",
            "/v1",
            "/v1/",
            "/update_weights_from_disk",
            "/sleep",
            "/v1/load_lora_adapter",
            "/v1/../sleep",
            "/v1/./../sleep",
            "/v1/%2e%2e/sleep",
            "/v1/..%2fsleep",
            "/v1//sleep",
            "//v1/x",
            "/v1/..\\sleep",
            "/v1/..;/sleep",
            "/generate/../sleep",
            "/rerank/x",
        ] {
            assert!(!may_pass(path), "{path}");
        }
    }
}
