"""What a constraint's backend raised, as the error that ends its request and no other."""

from __future__ import annotations

import logging

from branchline.engine.errors import EngineError, InternalError
from branchline.engine.scheduler.sequence import Sequence

logger = logging.getLogger(__name__)


def fault(sequence: Sequence, error: Exception) -> EngineError:
    """What a backend raised, as the reason why the sequence's row may not be used."""
    if isinstance(error, EngineError):
        return error
    logger.error("the constraint of request %s failed", sequence.group.request.request_id, exc_info=error)
    return InternalError(f"the grammar backend failed: {type(error).__name__}: {error}")
