"""What leases mean to a request: checked when it comes, held while it lives, granted when its prompt is computed.

Between the scheduler and the lease book; owns neither.
"""

from __future__ import annotations

from array import array

from branchline.engine.cache.leases import LeaseBook
from branchline.engine.scheduler.sequence import Group, Sequence
from branchline.engine.types import LeaseReport, LeaseState


class Leasing:
    """Every `enter` is undone by one `leave`, on every way out."""

    def __init__(self, book: LeaseBook) -> None:
        self.book = book

    def enter(self, group: Group, now: float) -> None:
        """Look at the request's lease. Raises InvalidArgument or ResourceExhausted for one that can't be granted."""
        request = group.request
        ask = request.lease
        if ask is None:
            return
        ids = _prompt(group.sequences[0])
        if ask.ttl_ms is not None:
            self.book.check(ask.tenant, request.namespace, ids, now)
            return
        state, group.lease_node = self.book.use(ask.lease_id, ask.tenant, request.namespace, ids, now)
        group.lease = LeaseReport(state)

    def grant(self, sequence: Sequence, now: float) -> None:
        """The prompt's pages are in the tree: take the lease that was asked for. Raises ResourceExhausted."""
        group = sequence.group
        request, ask = group.request, group.request.lease
        if ask is None or ask.ttl_ms is None or sequence.index:
            return
        lease = self.book.grant(ask.tenant, request.namespace, _prompt(sequence), ask.ttl_ms, now)
        group.lease = LeaseReport(LeaseState.HELD, lease.lease_id, len(lease.token_ids), len(lease.pages), ask.ttl_ms)

    def leave(self, group: Group) -> None:
        """The request has ended. Idempotent."""
        node, group.lease_node = group.lease_node, None
        if node is not None:
            self.book.leave(node)


def _prompt(sequence: Sequence) -> array[int]:
    """Its prompt as compiled code reads it best."""
    return sequence.known()[: sequence.prompt_len]
