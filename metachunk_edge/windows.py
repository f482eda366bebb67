"""Length → the blocks to decode, and what the KV cache keeps meanwhile.

Two policies, both of linear cost and constant memory:

- `rolling` reads every token once. Before each block the oldest cache entries are dropped, but for the first
  N_SINKS (attention sinks): dropping those too, as the paper does, makes the scores drift. Positions keep their
  distances; only where the model's trained positions end, the kept entries move back behind the sinks.
- `strided` starts every window anew with an empty cache and re-reads the half of it that the window before has
  scored: twice the work, and each score is exactly that of its window.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from metachunk_edge.backends.base import N_SINKS
from metachunk_edge.errors import SettingsError
from metachunk_edge.types import Block

__all__ = ["WINDOW_POLICIES", "plan_blocks"]

WINDOW_POLICIES = ("rolling", "strided")


def plan_blocks(
    n_tokens: int | None, *, policy: str, context_length: int, block_size: int, position_limit: int
) -> Iterator[Block]:
    """Return the blocks that score `n_tokens` tokens once each; with None, blocks without end, for a stream.

    Args:
        n_tokens: the length of the document.
        policy: "rolling" or "strided".
        context_length: how many cache entries a token may see at most, its own block included.
        block_size: tokens per block at most.
        position_limit: positions at or above this are never used.

    Raises:
        SettingsError: the policy is unknown, or the context is too short for two blocks and the sinks.

    >>> [(b.start, b.end, b.keep_from) for b in plan_blocks(
    ...     20, policy="rolling", context_length=16, block_size=6, position_limit=99)]
    [(0, 6, 0), (6, 12, 0), (12, 18, 6), (18, 20, 12)]
    """
    shortest = 2 * block_size + N_SINKS
    if context_length < shortest:
        raise SettingsError(f"context_length must be at least {shortest}, got {context_length}")
    if position_limit < context_length:
        raise SettingsError(f"context_length must be at most {position_limit} for this model, got {context_length}")
    if policy == "rolling":
        blocks = _rolling(context_length, block_size, position_limit)
    elif policy == "strided":
        blocks = _strided(context_length, block_size)
    else:
        raise SettingsError(f"window must be one of {', '.join(WINDOW_POLICIES)}, got {policy!r}")
    return blocks if n_tokens is None else _first(n_tokens, blocks)


def _rolling(context_length: int, block_size: int, position_limit: int) -> Iterator[Block]:
    position = 0
    for start in itertools.count(step=block_size):
        # An entry is kept if, at the end of this block, no more than context_length are in the cache.
        keep_from = position + block_size + N_SINKS - context_length
        keep_from = keep_from if keep_from > N_SINKS else 0
        shift = keep_from - N_SINKS if position + block_size > position_limit else 0
        position -= shift
        yield Block(start, start + block_size, start, position, keep_from, shift, restart=start == 0)
        position += block_size


def _strided(context_length: int, block_size: int) -> Iterator[Block]:
    half = context_length // (2 * block_size) * block_size
    for scored in itertools.count(step=half):
        begin = max(0, scored - half)
        for start in range(begin, scored + half, block_size):
            score_from = start if start >= scored else start + block_size
            position = start - begin
            yield Block(start, start + block_size, score_from, position, 0, 0, restart=start == begin)


def _first(n_tokens: int, blocks: Iterator[Block]) -> Iterator[Block]:
    scored_to = 0
    for block in blocks:
        if scored_to >= n_tokens:
            return
        end = min(block.end, n_tokens)
        score_from = min(block.score_from, end)
        yield Block(block.start, end, score_from, block.position, block.keep_from, block.shift, block.restart)
        scored_to = end if score_from < end else scored_to
