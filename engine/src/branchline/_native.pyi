"""Native parts of the engine: prefix cache, page ledger and text automaton.

Ids and pages are taken as sequences of integers or integer buffers (`array`, numpy int32, uint32, int64);
lists, tuples and buffers are the fast ones. A wrong value raises ValueError, a wrong type TypeError.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, final

import numpy as np
import numpy.typing as npt

__all__ = [
    "CpuModel", "PageCache", "PenaltyState", "TextStream", "Vocabulary", "block_hashes", "checksum", "namespace",
    "page_demand", "push_many", "sample_rows",
]  # fmt: skip

_Ids: TypeAlias = Sequence[int] | array[int] | npt.NDArray[np.int32] | npt.NDArray[np.uint32] | npt.NDArray[np.int64]
_Stored: TypeAlias = tuple[Literal["stored"], int, list[int], list[int]]
_Event: TypeAlias = _Stored | tuple[Literal["removed"], list[int]] | tuple[Literal["cleared"]]

@final
class Vocabulary:
    """A tokenizer and the bytes of its ids; immutable, shared by streams and threads."""

    @staticmethod
    def from_tokenizer_json(data: bytes) -> Vocabulary:
        """Read a tokenizer.json; ValueError says why it can't be."""

    def __len__(self) -> int:
        """One more than the highest id."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes an id stands for; empty if it has no entry."""

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token such as an end mark."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text; text that spells an added token gives its id."""

    def decode(self, token_ids: _Ids, skip_special_tokens: bool = True) -> str:
        """The text of the ids by the tokenizer's own decoder; ids without an entry give nothing."""

@final
class TextStream:
    """The text of one sequence, token by token. Any chunking of the same ids gives the same text and stop."""

    def __new__(
        cls,
        vocabulary: Vocabulary,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> TextStream:
        """Start at the first token; ValueError if a stop is empty."""

    def push(self, token_ids: _Ids) -> tuple[str, int, str | None]:
        """Text now safe to send, tokens consumed (the last one completed the stop, if any), matched stop."""

    def finish(self) -> str:
        """End without a stop: the held text; an unfinished character becomes one U+FFFD."""

@final
class PageCache:
    """Owner of every KV page: free, in the prefix tree (evictable or protected), or private to the caller.

    One thread drives it. Every call either happens whole or raises with nothing changed.
    """

    def __new__(
        cls,
        num_pages: int,
        page_size: int,
        *,
        policy: Sequence[int] | None = None,
        share: bool = True,
        host_pages: int = 0,
    ) -> PageCache:
        """A pool of free pages. With share=False nothing is found and insert leaves all pages private.

        `policy` ranks 64 levels of use by 256 priorities from -128 on, 0 to 255 each; without one all are alike.
        """

    def match(self, namespace: bytes, token_ids: _Ids, limit: int) -> tuple[int, list[int]]:
        """Node and pages of the longest cached whole-page prefix of at most `limit` tokens.

        It becomes the most recent. The node is only good until something evicts: lock it first. Node 0 is
        the empty prefix: locking it does nothing.
        """

    def lock(self, node: int) -> None:
        """Keep the node's prefix from eviction; locks count. ValueError if any of it was evicted."""

    def unlock(self, node: int) -> None:
        """Undo one lock; the prefix becomes the most recent."""

    def credit(self, node: int, priority: int = 0) -> None:
        """Count one more use of the node's prefix, by a request of a priority, for the policy; makes it recent."""

    def tick(self, now_ms: int) -> None:
        """The time that ages are counted from."""

    def available(self) -> int:
        """Free and evictable pages."""

    def allocate(self, count: int) -> list[int] | None:
        """Private pages, evicting as needed; None, and nothing changed, if there aren't as many."""

    def insert(self, namespace: bytes, token_ids: _Ids, pages: _Ids, priority: int = 0) -> tuple[int, int]:
        """Put a prefix's whole pages into the tree: deepest node, and how many pages were there before.

        `pages[present:whole]` must be private and become the tree's. Those of `pages[:present]` that are not
        the tree's own stay private to the caller. One page for a partial tail may follow; it stays private.
        """

    def free(self, pages: _Ids, epoch: int = 0) -> None:
        """Private pages back to the pool: at once for a retired epoch (0 always is), else when it is."""

    def retire(self, epoch: int) -> None:
        """The step `epoch` and all before it no longer read any page."""

    def evict(self, pages: int) -> int:
        """Evict up to `pages` pages, tails of the leaves of least rank first: how many it were."""

    def flush(self) -> int:
        """Evict all that is unlocked: how many pages."""

    def fetch(self, namespace: bytes, token_ids: _Ids, limit: int) -> int:
        """Bring pages that follow the device's back from the host, unlocked, as many as fit: how many."""

    def drain_moves(self) -> list[tuple[bool, int, int]]:
        """Copies to be done, in order: (True, page, slot) from page to slot, (False, page, slot) back."""

    def host_counters(self) -> tuple[int, int, int, int]:
        """Host slots, those in use, pages stored and pages fetched so far."""

    def counters(self) -> tuple[int, int, int, int]:
        """Pages free, evictable, protected and private (freed but in flight included): sum is num_pages."""

    def drain_events(self) -> list[_Event]:
        """Changes of residency since the last drain.

        ("stored", parent hash, block hashes, tokens) | ("removed", hashes, children first) | ("cleared",).
        The parent of a first block is the namespace's root hash.
        """

    def snapshot(self) -> list[_Stored]:
        """Everything resident, parents first."""

    def view(
        self, cursor: int, limit: int, tokens: int, leases: Sequence[int]
    ) -> tuple[list[tuple[int, int, int, int, int, int, int, int, int, int, bool, list[int]]], int, int, int]:
        """(nodes, next cursor, nodes in all, namespaces); a node's fields are those of `NodeView` in order."""

    def audit(self) -> None:
        """Check every page, node and counter in O(pages); RuntimeError names the first contradiction."""

def namespace(cache_salt: str | None, extra_key: str | None, adapter: str | None, weight_version: str) -> bytes:
    """Injective encoding of what besides the tokens decides a cache entry."""

def block_hashes(namespace: bytes, token_ids: _Ids, page_size: int) -> list[int]:
    """Chained hash of every whole page; those of the events."""

def checksum(data: bytes | memoryview) -> int:
    """XXH3-64 of contiguous bytes."""

def page_demand(prefix: int, length: int, page_size: int) -> int:
    """Pages to allocate so that a sequence grows from `prefix` to `length` tokens."""

def push_many(streams: Sequence[TextStream], token_ids: _Ids) -> list[tuple[str, int, str | None]]:
    """Push one token to each stream."""

_Outcome: TypeAlias = tuple[
    int, float | None, list[tuple[int, float]] | None, list[tuple[int, float]] | None, str | None
]

@final
class CpuModel:
    """A model on the CPU: add every tensor, then `finish`, then run steps. One thread calls it."""

    isa: str
    threads: int

    def __new__(
        cls,
        spec: dict[str, Any],
        *,
        num_pages: int,
        page_size: int,
        threads: int = 0,
        isa: str | None = None,
        weight_dtype: str = "auto",
        kv_dtype: str = "i16",
    ) -> CpuModel:
        """Fields of ModelSpec by name; rope_scaling a dict or None. threads 0: as many as cores."""

    def add(
        self, name: str, type_name: str, rows: int, cols: int, data: bytes | memoryview, interleaved_heads: int = 0
    ) -> None:
        """Take one tensor as stored; a vector has one column. The buffer must not change meanwhile."""

    def finish(self) -> None:
        """Check that nothing is missing, reserve the cache and start the threads."""

    def weight_bytes(self) -> int:
        """Bytes of weights held."""

    def start_profile(self, on: bool) -> None:
        """Measure where the time of steps goes from now on, or no more; forgets what was measured."""

    def profile(self) -> list[tuple[str, float, int]]:
        """(operation, seconds, calls) since start_profile."""

    def sweep(self, rounds: int) -> tuple[int, float]:
        """Read all weights and compute nothing: bytes of a round and seconds of the fastest."""

    def run(
        self,
        token_ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int64],
        query_lens: npt.NDArray[np.int32],
        context_lens: npt.NDArray[np.int32],
        page_tables: list[list[int]],
        logit_rows: npt.NDArray[np.int64],
    ) -> int:
        """One step; see ForwardBatch. The number of logits rows, kept until the next call."""

    def page_bytes(self) -> int:
        """Bytes of one page's keys and values."""

    def reserve_host(self, slots: int) -> None:
        """Memory for so many pages of the host tier; ValueError if there is none."""

    def move_pages(self, moves: Sequence[tuple[bool, int, int]]) -> None:
        """Copy in order: (True, page, slot) from page to slot, (False, page, slot) back. ValueError copies nothing."""

    def read_pages(self, pages: Sequence[int]) -> bytes:
        """Keys and values of these pages, one after the other. ValueError for one that does not exist."""

    def write_pages(self, pages: Sequence[int], data: bytes | memoryview) -> None:
        """Fill these pages from what `read_pages` gave. ValueError, and nothing written, for other sizes."""

    def logits(self) -> bytes:
        """Logits of the last step as little-endian f32, row after row."""

    def sample(self, plans: Sequence[Any]) -> list[_Outcome]:
        """Answer RowPlans about the last step: the fields of RowResult, in order."""

    def close(self) -> None:
        """Release memory and threads; idempotent."""

@final
class PenaltyState:
    """Token counts of one sequence for its penalties."""

    def __new__(cls, prompt: Sequence[int], repetition: float, frequency: float, presence: float) -> PenaltyState: ...
    def observe(self, token_id: int) -> None:
        """Count one generated token."""

def sample_rows(logits: npt.NDArray[np.float32], vocab: int, plans: Sequence[Any]) -> list[_Outcome]:
    """Answer RowPlans about rows of `vocab` logits each, as CpuModel.sample does."""
