//! Finds markers in a text of single characters. What may still become one is held back.

/// Looks for some markers, of which none begins another.
#[derive(Debug)]
pub(super) struct Finder {
    markers: &'static [&'static str],
    held: String,
}

impl Finder {
    pub(super) fn new(markers: &'static [&'static str]) -> Self {
        Self { markers, held: String::new() }
    }

    /// Takes a character; gives what can be no part of a marker to `release`, and the marker that is whole now.
    pub(super) fn step(&mut self, character: char, mut release: impl FnMut(char)) -> Option<usize> {
        self.held.push(character);
        while !self.held.is_empty() {
            if let Some(found) = self.markers.iter().position(|marker| *marker == self.held) {
                self.held.clear();
                return Some(found);
            }
            if self.markers.iter().any(|marker| marker.starts_with(&self.held)) {
                return None;
            }
            release(self.held.remove(0));
        }
        None
    }

    /// Whether nothing is held.
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// What was held, when no more comes.
    pub(super) fn take(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(text: &str) -> (String, Vec<usize>, String) {
        let mut finder = Finder::new(&["<a>", "</a>"]);
        let (mut out, mut found) = (String::new(), Vec::new());
        for character in text.chars() {
            found.extend(finder.step(character, |released| out.push(released)));
        }
        (out, found, finder.take())
    }

    #[test]
    fn markers_are_found_also_after_a_false_start_and_tails_are_kept() {
        assert_eq!(run("x<<a>y</</a>"), ("x<y</".into(), vec![0, 1], String::new()));
        assert_eq!(run("東<a"), ("東".into(), vec![], "<a".into()));
    }
}
