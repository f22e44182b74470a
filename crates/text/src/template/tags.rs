//! Tags that mark text for training and mean nothing here: `generation` becomes a block that always applies.

/// The template without such tags; whitespace marks are kept, so the text around them is trimmed alike.
pub(super) fn plain(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |at| at + 2);
        out.push_str(&replaced(&tag[..end]));
        rest = &tag[end..];
    }
    out.push_str(rest);
    out
}

fn replaced(tag: &str) -> String {
    let word = tag.trim_start_matches(['{', '%', '-', '+']).trim_end_matches(['}', '%', '-', '+']).trim();
    match word {
        "generation" => tag.replacen("generation", "if true", 1),
        "endgeneration" => tag.replacen("endgeneration", "endif", 1),
        _ => tag.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::plain;

    #[test]
    fn generation_tags_become_blocks_and_keep_their_marks() {
        assert_eq!(plain("a{%- generation -%}b{% endgeneration +%}c"), "a{%- if true -%}b{% endif +%}c");
        assert_eq!(
            plain("{% if generation %}x{% endif %}{{ '{%' }}"),
            "{% if generation %}x{% endif %}{{ '{%' }}"
        );
        assert_eq!(plain("{% generation"), "{% if true");
        assert_eq!(plain("é"), "é");
    }
}
