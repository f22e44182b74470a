//! The committed pages equal what the tables say.

use std::path::Path;

use branchline_gateway::config::{PAGES, render};

#[test]
fn committed_pages_equal_the_generated_ones() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let files = [
        "docs/reference/router-options.md",
        "docs/reference/metrics.md",
        "bindings/python/python/branchline_router/_options.py",
    ];
    for (page, file) in PAGES.into_iter().zip(files) {
        let committed = std::fs::read_to_string(root.join(file)).unwrap_or_default();
        let generated = render(page).expect("a page");
        assert!(
            committed == generated,
            "{file} is stale; run `branchline-router --print-reference {page} > {file}`"
        );
    }
}
