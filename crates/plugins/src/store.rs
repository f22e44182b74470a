//! The key-value store that all calls of one module share: bounded, with a time to live, in memory.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Longest key.
const KEY_CAP: usize = 256;
/// Longest value.
const VALUE_CAP: usize = 64 << 10;
/// Bytes of keys and values, with a flat cost an entry.
const TOTAL_CAP: usize = 16 << 20;
/// What an entry costs beside its bytes.
const ENTRY_COST: usize = 128;

#[derive(Debug)]
struct Entry {
    value: Vec<u8>,
    expires: Option<Instant>,
    /// Which of the writes in `written` is its own.
    write: u64,
}

#[derive(Debug, Default)]
struct Inner {
    entries: HashMap<String, Entry>,
    /// Keys by time of writing, with outdated ones among them.
    written: VecDeque<(u64, String)>,
    writes: u64,
    bytes: usize,
}

/// The store.
#[derive(Debug, Default)]
pub(crate) struct Store {
    inner: Mutex<Inner>,
}

fn cost(key: &str, value: &[u8]) -> usize {
    key.len() + value.len() + ENTRY_COST
}

fn lifetime(now: Instant, ttl_ms: u64) -> Option<Instant> {
    // Beyond a year it is as good as none, and the addition can't overflow.
    (1..=31_536_000_000).contains(&ttl_ms).then(|| now + Duration::from_millis(ttl_ms))
}

impl Inner {
    fn live(&mut self, key: &str, now: Instant) -> Option<&mut Entry> {
        let gone = self.entries.get(key)?.expires.is_some_and(|at| at <= now);
        if gone {
            self.remove(key);
            return None;
        }
        self.entries.get_mut(key)
    }

    fn remove(&mut self, key: &str) {
        if let Some(entry) = self.entries.remove(key) {
            self.bytes -= cost(key, &entry.value);
        }
    }

    fn put(&mut self, key: &str, value: Vec<u8>, expires: Option<Instant>) {
        self.remove(key);
        self.bytes += cost(key, &value);
        self.writes += 1;
        self.written.push_back((self.writes, key.to_owned()));
        self.entries.insert(key.to_owned(), Entry { value, expires, write: self.writes });
        while self.bytes > TOTAL_CAP
            && let Some((write, key)) = self.written.pop_front()
        {
            if self.entries.get(&key).is_some_and(|entry| entry.write == write) {
                self.remove(&key);
            }
        }
        // Rewritten keys leave outdated names behind; they may not outgrow the live ones.
        if self.written.len() > 2 * self.entries.len() + 64 {
            let entries = &self.entries;
            self.written.retain(|(write, key)| entries.get(key).is_some_and(|entry| entry.write == *write));
        }
    }
}

impl Store {
    /// The value, unless it has expired.
    pub(crate) fn get(&self, key: &str, now: Instant) -> Option<Vec<u8>> {
        self.inner.lock().live(key, now).map(|entry| entry.value.clone())
    }

    /// Writes; false if key or value is too long.
    pub(crate) fn set(&self, key: &str, value: Vec<u8>, ttl_ms: u64, now: Instant) -> bool {
        if key.len() > KEY_CAP || value.len() > VALUE_CAP {
            return false;
        }
        self.inner.lock().put(key, value, lifetime(now, ttl_ms));
        true
    }

    /// Forgets a key.
    pub(crate) fn delete(&self, key: &str) {
        self.inner.lock().remove(key);
    }

    /// Adds to a decimal number in one step; what is no number counts as 0. A key that is too long is not kept.
    pub(crate) fn add(&self, key: &str, by: i64, ttl_ms: u64, now: Instant) -> i64 {
        let mut inner = self.inner.lock();
        let (old, expires) = match inner.live(key, now) {
            Some(entry) => {
                let number = std::str::from_utf8(&entry.value).ok().and_then(|text| text.parse().ok());
                (number.unwrap_or(0i64), entry.expires)
            }
            None => (0, lifetime(now, ttl_ms)),
        };
        let sum = old.saturating_add(by);
        if key.len() <= KEY_CAP {
            inner.put(key, sum.to_string().into_bytes(), expires);
        }
        sum
    }

    /// Live and expired bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.inner.lock().bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_lives_as_long_as_its_time_and_no_longer() {
        let (store, now) = (Store::default(), Instant::now());
        assert!(store.set("a", b"1".to_vec(), 10, now));
        assert!(store.set("b", b"2".to_vec(), 0, now));
        assert_eq!(store.get("a", now).as_deref(), Some(&b"1"[..]));
        let later = now + Duration::from_millis(10);
        assert_eq!(store.get("a", later), None);
        assert_eq!(store.get("b", later + Duration::from_secs(1_000_000)).as_deref(), Some(&b"2"[..]));
        store.delete("b");
        assert_eq!((store.get("b", now), store.bytes()), (None, 0));
    }

    #[test]
    fn a_number_grows_in_one_step_and_begins_anew_after_its_time() {
        let (store, now) = (Store::default(), Instant::now());
        assert_eq!(store.add("n", 5, 100, now), 5);
        assert_eq!(store.add("n", -2, 100, now + Duration::from_millis(99)), 3);
        assert_eq!(store.add("n", 1, 100, now + Duration::from_millis(100)), 1);
        assert_eq!(store.add("n", i64::MAX, 0, now + Duration::from_millis(101)), i64::MAX);
    }

    #[test]
    fn memory_is_bounded_and_the_oldest_writes_go_first() {
        let (store, now) = (Store::default(), Instant::now());
        assert!(!store.set("big", vec![0; VALUE_CAP + 1], 0, now));
        assert!(!store.set(&"k".repeat(KEY_CAP + 1), vec![], 0, now));
        for number in 0..400 {
            assert!(store.set(&format!("k{number}"), vec![0; VALUE_CAP], 0, now));
        }
        assert!(store.bytes() <= TOTAL_CAP);
        assert!(store.get("k0", now).is_none() && store.get("k399", now).is_some());
    }

    #[test]
    fn rewriting_one_key_does_not_grow_the_store() {
        let (store, now) = (Store::default(), Instant::now());
        for _ in 0..10_000 {
            store.add("n", 1, 0, now);
        }
        assert!(store.inner.lock().written.len() <= 70);
        assert_eq!(store.get("n", now).as_deref(), Some(&b"10000"[..]));
    }
}
