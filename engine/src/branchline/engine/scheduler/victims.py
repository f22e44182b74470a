"""Who gives way when pages or places run out. Pure choices over running sequences; changes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from branchline.engine.scheduler.sequence import Sequence


def for_pages(running: Iterable[Sequence], spare: Sequence | None) -> Sequence | None:
    """Whom to retract so that the others can grow: lowest priority, fewest generated tokens, latest admitted.

    None if nobody but `spare` runs, or if nobody but the last one runs: somebody must get on.
    """
    candidates = list(running)
    if len(candidates) < 2:
        return None
    return min(
        (item for item in candidates if item is not spare),
        key=lambda item: (item.priority, item.generated, -item.admitted),
    )


def for_priority(running: Iterable[Sequence], priority: int, most: int) -> Sequence | None:
    """Whom to preempt for a waiting sequence of `priority`: of those below it and not yet preempted `most` times,
    the one for_pages would take. None if there is none."""
    return min(
        (item for item in running if item.priority < priority and item.preemptions < most),
        key=lambda item: (item.priority, item.generated, -item.admitted),
        default=None,
    )
