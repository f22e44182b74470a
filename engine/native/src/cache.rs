//! `PageCache` and the hash functions for Python. Cheap calls: the GIL is kept, except for `audit`.

use branchline_prefix::{self as prefix, CacheOptions, Event, Move, NodeView, Policy};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::convert::{Ids, Numbers, value_error};
use crate::kernels::bytes_of;

/// Owner of every KV page: free, in the prefix tree, or private to the caller.
#[pyclass(module = "branchline._native")]
pub(crate) struct PageCache {
    inner: prefix::PageCache,
}

#[pymethods]
impl PageCache {
    #[new]
    #[pyo3(signature = (num_pages, page_size, *, policy = None, share = true, host_pages = 0))]
    fn new(
        num_pages: usize,
        page_size: usize,
        policy: Option<Vec<u8>>,
        share: bool,
        host_pages: usize,
    ) -> PyResult<Self> {
        let policy = policy.map_or_else(|| Ok(Policy::default()), Policy::new).map_err(value_error)?;
        let options = CacheOptions { num_pages, page_size, share, policy, host_pages };
        prefix::PageCache::new(options).map(|inner| Self { inner }).map_err(value_error)
    }

    #[pyo3(name = "match")]
    fn find(&mut self, namespace: &[u8], token_ids: Ids, limit: usize) -> (u64, Vec<u32>) {
        let found = self.inner.find(namespace, &token_ids, limit);
        (found.node, found.pages)
    }

    fn lock(&mut self, node: u64) -> PyResult<()> {
        self.inner.lock(node).map_err(value_error)
    }

    fn unlock(&mut self, node: u64) -> PyResult<()> {
        self.inner.unlock(node).map_err(value_error)
    }

    #[pyo3(signature = (node, priority = 0))]
    fn credit(&mut self, node: u64, priority: i32) -> PyResult<()> {
        self.inner.credit(node, priority).map_err(value_error)
    }

    fn tick(&mut self, now_ms: u64) {
        self.inner.tick(now_ms);
    }

    fn available(&self) -> usize {
        self.inner.available()
    }

    fn allocate(&mut self, count: usize) -> Option<Vec<u32>> {
        self.inner.allocate(count)
    }

    #[pyo3(signature = (namespace, token_ids, pages, priority = 0))]
    fn insert(
        &mut self,
        namespace: &[u8],
        token_ids: Ids,
        pages: Numbers,
        priority: i32,
    ) -> PyResult<(u64, usize)> {
        self.inner.insert(namespace, &token_ids, &pages.0, priority).map_err(value_error)
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

    /// Pages brought back from the host.
    fn fetch(&mut self, namespace: &[u8], token_ids: Ids, limit: usize) -> usize {
        self.inner.fetch(namespace, &token_ids, limit)
    }

    /// Copies to be done in order: (True, page, slot) stores, (False, page, slot) fetches.
    fn drain_moves(&mut self) -> Vec<(bool, u32, u32)> {
        let moves = self.inner.drain_moves().into_iter();
        moves
            .map(|one| match one {
                Move::Store { page, slot } => (true, page, slot),
                Move::Fetch { slot, page } => (false, page, slot),
            })
            .collect()
    }

    /// Host slots, those in use, pages stored and pages fetched so far.
    fn host_counters(&self) -> (usize, usize, u64, u64) {
        let host = self.inner.host_counters();
        (host.total, host.used, host.stored, host.fetched)
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

    /// (nodes, next cursor, nodes in all, namespaces); a node is a tuple in the order of `NodeView`'s fields.
    #[pyo3(signature = (cursor, limit, tokens, leases))]
    fn view<'py>(
        &self,
        py: Python<'py>,
        cursor: u32,
        limit: usize,
        tokens: usize,
        leases: Vec<u64>,
    ) -> PyResult<(Bound<'py, PyList>, u32, usize, usize)> {
        let view = self.inner.view(cursor, limit, tokens, &leases);
        let nodes = view.nodes.into_iter().map(|node| {
            let NodeView { node: number, parent, namespace_hash, pages, depth_tokens, .. } = node;
            let NodeView { locks, leases, uses, age_ms, children, on_host, tokens, .. } = node;
            (
                number,
                parent,
                namespace_hash,
                pages,
                depth_tokens,
                locks,
                leases,
                uses,
                age_ms,
                children,
                on_host,
                tokens,
            )
        });
        let nodes: Vec<_> = nodes.collect();
        Ok((PyList::new(py, nodes)?, view.next, view.nodes_total, view.namespaces_total))
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
pub(crate) fn block_hashes(namespace: &[u8], token_ids: Ids, page_size: usize) -> PyResult<Vec<u64>> {
    if page_size == 0 {
        return Err(PyValueError::new_err("page_size is 0: give a number from 1"));
    }
    Ok(prefix::hash::chain_all(namespace, &token_ids, page_size))
}

/// XXH3-64 of bytes that came from elsewhere, to be compared with what the sender said.
#[pyfunction]
pub(crate) fn checksum(py: Python<'_>, data: PyBuffer<u8>) -> PyResult<u64> {
    let bytes = bytes_of(&data).ok_or_else(|| PyValueError::new_err("the bytes are not contiguous"))?;
    Ok(py.detach(|| xxhash_rust::xxh3::xxh3_64(bytes)))
}

/// Pages to allocate so that a sequence grows from `prefix` to `length` tokens.
#[pyfunction]
pub(crate) fn page_demand(prefix: usize, length: usize, page_size: usize) -> PyResult<usize> {
    if page_size == 0 {
        return Err(PyValueError::new_err("page_size is 0: give a number from 1"));
    }
    Ok(branchline_prefix::page_demand(prefix, length, page_size))
}
