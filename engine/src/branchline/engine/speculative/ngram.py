"""`ngram`: the next tokens are those that followed the same tokens before: in this text, or in the radix tree.

Looks up the last three tokens in the sequence's own prompt and output, and the page after its last whole page
among those that finished sequences left. Costs microseconds; asks no model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from branchline.engine.config import SpeculativeOptions
from branchline.engine.speculative.base import NOTHING, Ask, DraftContext, Drafted, Proposal

LONG = 8  # equal tokens before the guess from which it counts as a copy
FOLLOWED = 4096  # most tokens taken over from the tree at once
MOST_LINKS = 1 << 16


class Followers:
    """The radix tree's edges: chained hash of a page → (hash, tokens) of the page that followed it last.

    Kept also after the pages are evicted: a guess needs the tokens, not their KV. Hashes are chained from the
    namespace, so nothing is learnt across namespaces. Bounded, oldest out.
    """

    def __init__(
        self, block_hashes: Callable[[bytes, Sequence[int]], list[int]], page_size: int, capacity: int
    ) -> None:
        self._block_hashes = block_hashes
        self._page_size = page_size
        self._capacity = capacity
        # The first page's parent is its namespace.
        self._links: OrderedDict[int | bytes, tuple[int, tuple[int, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._links)

    def learn(self, namespace: bytes, tokens: list[int], prompt_len: int) -> None:
        """Remember the whole pages from the prompt's last one on."""
        size = self._page_size
        hashes = self._block_hashes(namespace, tokens)
        for page in range(prompt_len // size, len(hashes)):
            parent = hashes[page - 1] if page else namespace
            self._links[parent] = (hashes[page], tuple(tokens[page * size : (page + 1) * size]))
            self._links.move_to_end(parent)
        while len(self._links) > self._capacity:
            self._links.popitem(last=False)

    def after(self, namespace: bytes, tokens: list[int]) -> list[int]:
        """What followed these tokens; empty if it is not known or the tail differs."""
        size = self._page_size
        whole = len(tokens) // size
        if not self._links:
            return []
        at: int | bytes = self._block_hashes(namespace, tokens)[whole - 1] if whole else namespace
        tail = tuple(tokens[whole * size :])
        found: list[int] = []
        while len(found) < FOLLOWED:
            link = self._links.get(at)
            if link is None:
                break
            at, block = link
            found.extend(block)
        return found[len(tail) :] if tuple(found[: len(tail)]) == tail else []


@dataclass(slots=True)
class _Text:
    """One sequence's index of its own tokens."""

    ends: dict[tuple[int, int, int], int] = field(default_factory=dict)  # three tokens → where they last ended
    indexed: int = 0  # tokens looked at
    seen: int = 0  # tokens of the sequence at the last guess
    source: int = -1  # position of the token that is guessed next; -1 if there is none
    equal: int = 0  # tokens before it that are equal
    followed: list[int] = field(default_factory=list)  # from the tree
    followed_at: int = -1  # position of the sequence at which `followed` begins; -1 if it was not asked
    tried_page: int = -1  # whole pages when the tree was last asked


class NgramDrafts:
    """SpeculativeAlgorithm over the text itself and the radix tree's continuations."""

    api_version = 1
    free = True
    wants_hidden = False

    def __init__(self, context: DraftContext) -> None:
        self._page_size = context.page_size
        self.followers = Followers(context.block_hashes, context.page_size, min(context.num_pages, MOST_LINKS))

    @staticmethod
    def option_faults(options: SpeculativeOptions) -> list[str]:
        """Refuses a draft model: there is none to run."""
        if options.draft_model:
            return ["speculative-draft-model has no meaning with speculative-algorithm ngram: leave it out"]
        return []

    def propose(self, asked: list[Ask]) -> list[Proposal]:
        """See SpeculativeAlgorithm."""
        return [self._guess(ask.sequence, ask.limit) for ask in asked]

    def accepted(self, sequence: Drafted, hidden: object) -> None:
        """Not called."""

    def end(self, sequence: Drafted, finished: bool) -> None:
        """What a finished sequence wrote can be guessed for the next one."""
        if finished and sequence.draft_state is not None:
            self.followers.learn(sequence.namespace, sequence.tokens, sequence.prompt_len)
            sequence.draft_state = None

    def close(self) -> None:
        """Nothing is held."""

    def _guess(self, sequence: Drafted, limit: int) -> Proposal:
        tokens = sequence.tokens
        text = sequence.draft_state
        if not isinstance(text, _Text):
            text = sequence.draft_state = _Text(seen=len(tokens))
        match = self._index(text, tokens)
        followed = self._follow(text, sequence)
        if followed:
            return Proposal(followed[:limit], "tree")
        self._advance(text, tokens, match)
        text.seen = len(tokens)
        if text.source < 0:
            return NOTHING
        return Proposal(_copy(tokens, text.source, limit), "copy" if text.equal >= LONG else "ngram")

    @staticmethod
    def _index(text: _Text, tokens: list[int]) -> int:
        """Index new tokens; the position after the last three's latest earlier occurrence, or -1."""
        ends, match = text.ends, -1
        for at in range(max(text.indexed, 2), len(tokens)):
            key = (tokens[at - 2], tokens[at - 1], tokens[at])
            match = ends.get(key, -1)
            ends[key] = at
        if text.indexed < len(tokens):
            text.indexed = len(tokens)
        return match + 1 if match >= 0 else -1

    @staticmethod
    def _advance(text: _Text, tokens: list[int], match: int) -> None:
        """Go on where the last guess pointed if what came agrees with it; else start at the new match."""
        new = len(tokens) - text.seen
        if text.source >= 0:
            source = text.source
            if all(tokens[source + step] == tokens[text.seen + step] for step in range(new)):
                text.source, text.equal = source + new, text.equal + new
                return
        text.source = match
        text.equal = _equal_before(tokens, match) if match >= 0 else 0

    def _follow(self, text: _Text, sequence: Drafted) -> list[int]:
        """The tree's continuation from here, as long as the text has kept to it."""
        tokens = sequence.tokens
        if text.followed:
            passed = len(tokens) - text.followed_at
            fresh = text.followed[:passed]
            if fresh == tokens[text.followed_at :]:
                text.followed = text.followed[passed:]
                text.followed_at = len(tokens)
                return text.followed
            text.followed = []
        page = len(tokens) // self._page_size
        if page == text.tried_page:
            return []
        text.tried_page = page
        text.followed = self.followers.after(sequence.namespace, tokens)
        text.followed_at = len(tokens)
        return text.followed


def _equal_before(tokens: list[int], source: int) -> int:
    """Equal tokens before `source` and before the end, as far as it matters."""
    end, count = len(tokens), 0
    while count < LONG and source - count > 0 and tokens[source - count - 1] == tokens[end - count - 1]:
        count += 1
    return count


def _copy(tokens: list[int], source: int, limit: int) -> list[int]:
    """`limit` tokens from `source` on; past the end they repeat what was copied."""
    draft = tokens[source : source + limit]
    start = len(draft)
    for step in range(start, limit):
        draft.append(draft[source + step - len(tokens)])
    return draft
