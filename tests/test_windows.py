"""The window plan: every token is scored once, within the context, at linear cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metachunk_edge import SettingsError
from metachunk_edge.backends.base import N_SINKS
from metachunk_edge.types import Block
from metachunk_edge.windows import WINDOW_POLICIES, plan_blocks

POLICIES = st.sampled_from(WINDOW_POLICIES)


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, int, int, str, list[Block]]:
    block_size = draw(st.integers(1, 12))
    context_length = draw(st.integers(2 * block_size + N_SINKS, 60))
    position_limit = draw(st.integers(context_length, 150))
    policy = draw(POLICIES)
    n_tokens = draw(st.integers(0, 400))
    blocks = list(
        plan_blocks(
            n_tokens,
            policy=policy,
            context_length=context_length,
            block_size=block_size,
            position_limit=position_limit,
        )
    )
    return n_tokens, context_length, position_limit, policy, blocks


@given(plans())
def test_every_token_is_scored_once_in_order(plan: tuple[int, int, int, str, list[Block]]) -> None:
    n_tokens, *_, blocks = plan
    assert [token for block in blocks for token in range(block.score_from, block.end)] == list(range(n_tokens))


@given(plans())
def test_the_cache_stays_within_the_context_and_the_positions_within_their_limit(
    plan: tuple[int, int, int, str, list[Block]],
) -> None:
    _, context_length, position_limit, _, blocks = plan
    cache: list[int] = []
    for block in blocks:
        cache = [] if block.restart else [p for p in cache if p < N_SINKS or p >= block.keep_from]
        cache = [p - block.shift if p >= N_SINKS else p for p in cache]
        assert block.position == (cache[-1] + 1 if cache else 0)
        cache += range(block.position, block.position + block.end - block.start)
        assert len(cache) == len(set(cache)) <= context_length
        assert cache[-1] < position_limit
        assert cache[:N_SINKS] == list(range(min(N_SINKS, len(cache))))


@given(plans())
def test_cost_is_linear(plan: tuple[int, int, int, str, list[Block]]) -> None:
    n_tokens, context_length, _, policy, blocks = plan
    n_decoded = sum(block.end - block.start for block in blocks)
    assert n_decoded == n_tokens if policy == "rolling" else n_decoded <= 2 * n_tokens + context_length


def test_a_strided_window_sees_at_least_a_third_of_the_context() -> None:
    blocks = list(plan_blocks(500, policy="strided", context_length=64, block_size=8, position_limit=64))
    assert min(block.position for block in blocks if block.score_from < block.end and block.start >= 64) >= 24


@pytest.mark.parametrize("context_length", [1, 63, 259])
def test_a_context_too_short_for_two_blocks_is_refused(context_length: int) -> None:
    with pytest.raises(SettingsError, match="at least 260"):
        plan_blocks(1, policy="rolling", context_length=context_length, block_size=128, position_limit=1_000)


def test_a_context_beyond_the_trained_positions_is_refused() -> None:
    with pytest.raises(SettingsError, match="at most 1000"):
        plan_blocks(1, policy="rolling", context_length=2_000, block_size=128, position_limit=1_000)
