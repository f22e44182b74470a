//! The page's files. Each stands in this table once; what is not in it is not served.

use std::sync::OnceLock;

use sha2::{Digest as _, Sha256};

/// A file as it is served.
pub(super) struct File {
    /// Below `/page/`.
    pub name: &'static str,
    /// Its `content-type`.
    pub kind: &'static str,
    /// What is in it.
    pub bytes: &'static [u8],
    tag: OnceLock<String>,
}

impl File {
    /// Its entity tag: the hash of its bytes, in quotes. Made when it is first asked for.
    pub(super) fn tag(&self) -> &str {
        self.tag.get_or_init(|| {
            let digest = Sha256::digest(self.bytes);
            let hex: String = digest[..16].iter().map(|byte| format!("{byte:02x}")).collect();
            format!("\"{hex}\"")
        })
    }
}

const HTML: &str = "text/html; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const PICTURE: &str = "image/svg+xml";

macro_rules! file {
    ($name:literal, $kind:expr) => {
        File {
            name: $name,
            kind: $kind,
            bytes: include_bytes!(concat!("files/", $name)),
            tag: OnceLock::new(),
        }
    };
}

/// The page itself.
pub(super) static INDEX: File = file!("index.html", HTML);

static FILES: [File; 18] = [
    file!("base.css", STYLE),
    file!("views.css", STYLE),
    file!("icon.svg", PICTURE),
    file!("app.js", SCRIPT),
    file!("api.js", SCRIPT),
    file!("chart.js", SCRIPT),
    file!("chat.js", SCRIPT),
    file!("dom.js", SCRIPT),
    file!("fleet.js", SCRIPT),
    file!("layout.js", SCRIPT),
    file!("metrics.js", SCRIPT),
    file!("modules.js", SCRIPT),
    file!("picture.js", SCRIPT),
    file!("routing.js", SCRIPT),
    file!("sampling.js", SCRIPT),
    file!("series.js", SCRIPT),
    file!("tree.js", SCRIPT),
    file!("turns.js", SCRIPT),
];

/// The file of a name below `/page/`.
pub(super) fn find(name: &str) -> Option<&'static File> {
    FILES.iter().find(|file| file.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(file: &File) -> &'static str {
        std::str::from_utf8(file.bytes).expect("text")
    }

    /// What follows `before` up to the next quote, wherever it stands.
    fn quoted(text: &'static str, before: &str) -> Vec<&'static str> {
        text.split(before).skip(1).filter_map(|rest| rest.split('"').next()).collect()
    }

    #[test]
    fn everything_that_is_named_is_served_and_everything_served_is_named() {
        let mut named: Vec<&str> =
            [quoted(text(&INDEX), "src=\"page/"), quoted(text(&INDEX), "href=\"page/")].concat();
        for file in FILES.iter().filter(|file| file.kind == SCRIPT) {
            named.extend(quoted(text(file), "from \"./"));
        }
        for name in &named {
            assert!(find(name).is_some(), "{name}");
        }
        for file in &FILES {
            assert!(named.contains(&file.name), "{}", file.name);
        }
    }

    #[test]
    fn the_markup_has_nothing_that_the_policy_would_stop() {
        let markup = text(&INDEX);
        for inline in
            [" style=", " onclick=", " onload=", "javascript:", "<style", "<script>", "http://", "https://"]
        {
            assert!(!markup.contains(inline), "{inline}");
        }
        for file in FILES.iter().filter(|file| file.kind == SCRIPT) {
            for sink in
                ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"]
            {
                assert!(!text(file).contains(sink), "{}: {sink}", file.name);
            }
        }
    }

    #[test]
    fn tags_tell_files_apart() {
        let mut tags: Vec<&str> = FILES.iter().map(File::tag).collect();
        tags.push(INDEX.tag());
        tags.sort_unstable();
        tags.dedup();
        assert_eq!(tags.len(), FILES.len() + 1);
        assert!(tags.iter().all(|tag| tag.len() == 34 && tag.starts_with('"') && tag.ends_with('"')));
    }
}
