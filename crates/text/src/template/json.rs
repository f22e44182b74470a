//! JSON text as Python's `json.dumps` writes it: models were trained on exactly these spaces and escapes.

use std::fmt::Write;

use serde_json::Value;

/// More is of no use to a reader and would let a template ask for any amount of memory.
const MAX_INDENT: usize = 32;

/// The arguments of `json.dumps` that templates use.
#[derive(Debug)]
pub(super) struct Style {
    pub(super) ascii: bool,
    pub(super) sort_keys: bool,
    indent: Option<usize>,
    item_separator: String,
    key_separator: String,
}

impl Default for Style {
    fn default() -> Self {
        Self {
            ascii: false,
            sort_keys: false,
            indent: None,
            item_separator: ", ".to_owned(),
            key_separator: ": ".to_owned(),
        }
    }
}

impl Style {
    pub(super) fn set_indent(&mut self, indent: usize) -> Result<(), String> {
        if indent > MAX_INDENT {
            return Err(format!("indent is {indent}: give at most {MAX_INDENT}"));
        }
        self.indent = Some(indent);
        self.item_separator = ",".to_owned();
        Ok(())
    }

    pub(super) fn set_separators(&mut self, item: String, key: String) {
        self.item_separator = item;
        self.key_separator = key;
    }

    pub(super) fn dump(&self, value: &Value) -> String {
        let mut out = String::new();
        self.value(&mut out, value, 0);
        out
    }

    fn value(&self, out: &mut String, value: &Value, depth: usize) {
        match value {
            Value::Null => out.push_str("null"),
            Value::Bool(true) => out.push_str("true"),
            Value::Bool(false) => out.push_str("false"),
            Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
                Some(float) => out.push_str(&float_repr(float)),
                None => out.push_str(&number.to_string()),
            },
            Value::String(text) => self.text(out, text),
            Value::Array(values) => {
                self.container(out, ['[', ']'], depth, values.iter(), |style, out, value| {
                    style.value(out, value, depth + 1);
                });
            }
            Value::Object(fields) => {
                let mut fields: Vec<_> = fields.iter().collect();
                if self.sort_keys {
                    fields.sort_unstable_by_key(|(name, _)| *name);
                }
                self.container(out, ['{', '}'], depth, fields.into_iter(), |style, out, (name, value)| {
                    style.text(out, name);
                    out.push_str(&style.key_separator);
                    style.value(out, value, depth + 1);
                });
            }
        }
    }

    fn container<T>(
        &self,
        out: &mut String,
        [open, close]: [char; 2],
        depth: usize,
        items: impl ExactSizeIterator<Item = T>,
        write: impl Fn(&Self, &mut String, T),
    ) {
        out.push(open);
        let is_empty = items.len() == 0;
        for (index, item) in items.enumerate() {
            if index > 0 {
                out.push_str(&self.item_separator);
            }
            self.new_line(out, depth + 1);
            write(self, out, item);
        }
        if !is_empty {
            self.new_line(out, depth);
        }
        out.push(close);
    }

    fn new_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn text(&self, out: &mut String, text: &str) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                '\0'..='\u{1f}' => escape(out, u16::try_from(u32::from(character)).unwrap_or_default()),
                _ if self.ascii && !(' '..='\u{7e}').contains(&character) => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        escape(out, *unit);
                    }
                }
                _ => out.push(character),
            }
        }
        out.push('"');
    }
}

fn escape(out: &mut String, unit: u16) {
    write!(out, "\\u{unit:04x}").expect("writing to a string can't fail");
}

/// Python's `repr` of a float: both languages print the shortest digits and switch to exponents at the same
/// sizes, only the exponent is spelt differently.
fn float_repr(float: f64) -> String {
    let text = format!("{float:?}");
    match text.split_once('e') {
        None => text,
        Some((digits, exponent)) => {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(rest) => ('-', rest),
                None => ('+', exponent),
            };
            format!("{digits}e{sign}{exponent:0>2}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_spelt_as_python_spells_them() {
        let cases = [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
            (1e-5, "1e-05"),
            (0.0001, "0.0001"),
            (-2.5e-10, "-2.5e-10"),
            (1.5e300, "1.5e+300"),
        ];
        for (float, text) in cases {
            assert_eq!(float_repr(float), text);
        }
    }

    #[test]
    fn dump_follows_the_arguments() {
        let value = serde_json::json!({"b": [1, 2.0, {}], "a": "é<\u{1}\"🙂"});
        let mut style = Style::default();
        assert_eq!(style.dump(&value), "{\"b\": [1, 2.0, {}], \"a\": \"é<\\u0001\\\"🙂\"}");
        (style.ascii, style.sort_keys) = (true, true);
        style.set_separators(",".into(), ":".into());
        assert_eq!(style.dump(&value), "{\"a\":\"\\u00e9<\\u0001\\\"\\ud83d\\ude42\",\"b\":[1,2.0,{}]}");
        let mut style = Style::default();
        style.set_indent(2).unwrap();
        assert_eq!(style.dump(&value["b"]), "[\n  1,\n  2.0,\n  {}\n]");
        assert!(style.set_indent(33).unwrap_err().contains("33"));
    }
}
