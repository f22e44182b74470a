//! `PageCache` and the hash functions for Python. Cheap calls: the GIL is kept, except for `audit`.

use branchline_prefix::{self as prefix, CacheOptions, Event};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::convert::{Numbers, value_error};

/// Owner of every KV page: free, in the prefix tree, or private to the caller.
#[pyclass(module = "branchline._native")]
pub(crate) struct PageCache {
    inner: prefix::PageCache,
}

#[pymethods]
impl PageCache {
    #[new]
    #[pyo3(signature = (num_pages, page_size, *, eviction = "lru", share = true))]
    fn new(num_pages: usize, page_size: usize, eviction: &str, share: bool) -> PyResult<Self> {
        if eviction != "lru" {
            return Err(PyValueError::new_err(format!("eviction is {eviction:?}: only \"lru\" is known")));
        }
        let options = CacheOptions { num_pages, page_size, share };
        prefix::PageCache::new(options).map(|inner| Self { inner }).map_err(value_error)
    }

    #[pyo3(name = "match")]
    fn find(&mut self, namespace: &[u8], token_ids: Numbers, limit: usize) -> (u64, Vec<u32>) {
        let found = self.inner.find(namespace, &token_ids.0, limit);
        (found.node, found.pages)
    }

    fn lock(&mut self, node: u64) -> PyResult<()> {
        self.inner.lock(node).map_err(value_error)
    }

    fn unlock(&mut self, node: u64) -> PyResult<()> {
        self.inner.unlock(node).map_err(value_error)
    }

    fn available(&self) -> usize {
        self.inner.available()
    }

    fn allocate(&mut self, count: usize) -> Option<Vec<u32>> {
        self.inner.allocate(count)
    }

    fn insert(&mut self, namespace: &[u8], token_ids: Numbers, pages: Numbers) -> PyResult<(u64, usize)> {
        self.inner.insert(namespace, &token_ids.0, &pages.0).map_err(value_error)
    }

    #[pyo3(signature = (pages, epoch = 0))]
    fn free(&mut self, pages: Numbers, epoch: u64) -> PyResult<()> {
        self.inner.free(&pages.0, epoch).map_err(value_error)
    }

    fn retire(&mut self, epoch: u64) {
        self.inner.retire(epoch);
    }

    fn evict(&mut self, pages: usize) -> usize {
        self.inner.evict(pages)
    }

    fn flush(&mut self) -> usize {
        self.inner.flush()
    }

    fn counters(&self) -> (usize, usize, usize, usize) {
        let counters = self.inner.counters();
        (counters.free, counters.evictable, counters.protected, counters.private)
    }

    fn drain_events<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        events(py, self.inner.drain_events())
    }

    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        events(py, self.inner.snapshot())
    }

    fn audit(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.inner.audit()).map_err(PyRuntimeError::new_err)
    }
}

fn events<'py>(py: Python<'py>, events: Vec<Event>) -> PyResult<Bound<'py, PyList>> {
    let tuples: Vec<Bound<'py, PyTuple>> = events
        .into_iter()
        .map(|event| match event {
            Event::Stored { parent, hashes, tokens } => ("stored", parent, hashes, tokens).into_pyobject(py),
            Event::Removed(hashes) => ("removed", hashes).into_pyobject(py),
            Event::Cleared => ("cleared",).into_pyobject(py),
        })
        .collect::<PyResult<_>>()?;
    PyList::new(py, tuples)
}

/// Injective encoding of what besides the tokens decides a cache entry.
#[pyfunction]
#[pyo3(signature = (cache_salt, extra_key, adapter, weight_version))]
pub(crate) fn namespace(
    cache_salt: Option<&str>,
    extra_key: Option<&str>,
    adapter: Option<&str>,
    weight_version: &str,
) -> Vec<u8> {
    prefix::namespace::encode(cache_salt, extra_key, adapter, weight_version)
}

/// Chained hash of every whole page.
#[pyfunction]
pub(crate) fn block_hashes(namespace: &[u8], token_ids: Numbers, page_size: usize) -> PyResult<Vec<u64>> {
    if page_size == 0 {
        return Err(PyValueError::new_err("page_size is 0: give a number from 1"));
    }
    Ok(prefix::hash::chain_all(namespace, &token_ids.0, page_size))
}

/// Pages to allocate so that a sequence grows from `prefix` to `length` tokens.
#[pyfunction]
pub(crate) fn page_demand(prefix: usize, length: usize, page_size: usize) -> PyResult<usize> {
    if page_size == 0 {
        return Err(PyValueError::new_err("page_size is 0: give a number from 1"));
    }
    Ok(branchline_prefix::page_demand(prefix, length, page_size))
}
