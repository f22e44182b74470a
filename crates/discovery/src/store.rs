//! What one query's objects are, by the last list and the events since. Deletes are state: an object is gone when a list
//! is without it or its deletion is told, by its name and not by what the event carries.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::member::Member;
use crate::object::Object;

/// Namespace and name.
type Key = (String, String);

/// Deletions that are remembered against events that come late; forgotten at the next list.
const GRAVES: usize = 4096;

#[derive(Debug)]
struct Item {
    uid: String,
    version: Option<u64>,
    members: Vec<Arc<Member>>,
}

/// The objects of one query.
#[derive(Debug, Default)]
pub(crate) struct Store {
    items: BTreeMap<Key, Item>,
    /// Version of the deletion, of names that have none again.
    graves: BTreeMap<Key, u64>,
}

impl Store {
    /// Takes a whole list in place of all that was known.
    pub(crate) fn replace(&mut self, objects: Vec<(Object, Vec<Arc<Member>>)>) {
        self.graves.clear();
        self.items =
            objects.into_iter().map(|(object, members)| (key(&object), item(&object, members))).collect();
    }

    /// Notes that an object is so now, unless a later state of it is known.
    pub(crate) fn put(&mut self, object: &Object, members: Vec<Arc<Member>>) {
        let (key, new) = (key(object), item(object, members));
        let late = |known: Option<u64>| known.zip(new.version).is_some_and(|(known, new)| new < known);
        if self.items.get(&key).is_some_and(|old| late(old.version)) || late(self.graves.get(&key).copied()) {
            return;
        }
        self.graves.remove(&key);
        self.items.insert(key, new);
    }

    /// Notes a deletion; one of an older object of the same name changes nothing.
    pub(crate) fn delete(&mut self, object: &Object) {
        let key = key(object);
        let uid = &object.metadata.uid;
        let other = |old: &Item| !uid.is_empty() && !old.uid.is_empty() && old.uid != *uid;
        if self.items.get(&key).is_some_and(other) {
            return;
        }
        self.items.remove(&key);
        if let Some(version) = version(object) {
            if self.graves.len() >= GRAVES {
                self.graves.clear();
            }
            self.graves.insert(key, version);
        }
    }

    /// How many objects there are.
    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    /// All workers.
    pub(crate) fn members(&self) -> impl Iterator<Item = &Arc<Member>> {
        self.items.values().flat_map(|item| &item.members)
    }
}

fn key(object: &Object) -> Key {
    (object.metadata.namespace.clone(), object.metadata.name.clone())
}

fn item(object: &Object, members: Vec<Arc<Member>>) -> Item {
    Item { uid: object.metadata.uid.clone(), version: version(object), members }
}

/// Versions grow; those that are no number are not compared.
fn version(object: &Object) -> Option<u64> {
    object.metadata.resource_version.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, uid: &str, version: &str) -> Object {
        let mut object = Object::default();
        object.metadata.name = name.to_owned();
        object.metadata.uid = uid.to_owned();
        object.metadata.resource_version = version.to_owned();
        object
    }

    fn uids(store: &Store) -> Vec<&str> {
        store.items.values().map(|item| item.uid.as_str()).collect()
    }

    #[test]
    fn an_older_state_never_replaces_a_later_one() {
        let mut store = Store::default();
        store.put(&pod("p", "a", "10"), vec![]);
        store.put(&pod("p", "b", "9"), vec![]);
        assert_eq!(uids(&store), ["a"]);
        store.put(&pod("p", "b", "100"), vec![]);
        assert_eq!(uids(&store), ["b"], "versions are numbers and no texts");
        store.put(&pod("p", "c", "later"), vec![]);
        assert_eq!(uids(&store), ["c"], "what is no number is taken as it comes");
    }

    #[test]
    fn a_deleted_name_does_not_come_back_by_a_late_event() {
        let mut store = Store::default();
        store.put(&pod("p", "a", "10"), vec![]);
        store.delete(&pod("p", "a", "12"));
        store.put(&pod("p", "a", "11"), vec![]);
        assert_eq!(store.len(), 0);
        store.put(&pod("p", "b", "13"), vec![]);
        assert_eq!(uids(&store), ["b"]);
    }

    #[test]
    fn a_late_deletion_of_the_last_pod_of_a_name_spares_the_next_one() {
        let mut store = Store::default();
        store.put(&pod("p", "b", "13"), vec![]);
        store.delete(&pod("p", "a", "12"));
        assert_eq!(uids(&store), ["b"]);
        store.delete(&pod("p", "", ""));
        assert_eq!(store.len(), 0, "a deletion without a uid counts by its name");
    }

    #[test]
    fn a_list_is_all_there_is() {
        let mut store = Store::default();
        store.put(&pod("p", "a", "10"), vec![]);
        store.delete(&pod("q", "x", "99"));
        store.replace(vec![(pod("q", "y", "5"), vec![])]);
        assert_eq!(uids(&store), ["y"], "a list of an older server may go back");
    }

    #[test]
    fn remembered_deletions_are_bounded() {
        let mut store = Store::default();
        for at in 0..3 * GRAVES {
            store.delete(&pod(&at.to_string(), "a", "5"));
        }
        assert!(store.graves.len() <= GRAVES);
    }
}
