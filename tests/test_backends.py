"""One contract for every backend: add a line to BACKENDS, and a new one gets all of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np
import pytest
import regex
from strategies import HOSTILE

from metachunk_edge import BackendError, Chunker, FakeBackend, Settings
from metachunk_edge.backends.base import N_SINKS, Backend, LogitsSession
from metachunk_edge.parity_figures import log_softmax
from metachunk_edge.tokens import encode
from metachunk_edge.types import FloatArray, TokenIds

WITH_LOGITS = [
    pytest.param("small_backend", marks=pytest.mark.model),
    "reference_backend",
    "gguf_backend",
    "onnx_backend",
    "fused_backend",
]
BACKENDS = ["fake", *WITH_LOGITS]
TEXT = "A contract is a promise between two parties. Each of them relies on it, and neither looks behind it. " * 8


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "fake":
        return FakeBackend(context_length=256, block_size=64)
    found: Backend = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def ids(backend: Backend) -> TokenIds:
    return encode(TEXT, backend.tokenizer).ids


def inputs_of(ids: TokenIds, backend: Backend) -> TokenIds:
    return np.concatenate([[backend.tokenizer.prefix_id], ids[:-1]]).astype(np.int32)


def in_blocks(backend: Backend, ids: TokenIds, block_size: int) -> FloatArray:
    return in_blocks_of(backend, ids, [*range(block_size, len(ids), block_size), len(ids)])


def in_blocks_of(backend: Backend, ids: TokenIds, ends: list[int]) -> FloatArray:
    inputs = inputs_of(ids, backend)
    with backend.open_session() as session:
        parts = [
            session.advance(inputs[start:end], ids[start:end], position=start, keep_from=0, shift=0)
            for start, end in zip([0, *ends], ends, strict=False)
        ]
    return np.concatenate(parts)


def test_log_probabilities_are_finite_negative_and_float32(backend: Backend, ids: TokenIds) -> None:
    logprobs = in_blocks(backend, ids[:40], 20)
    assert logprobs.shape == (40,)
    assert logprobs.dtype == np.float32
    assert np.isfinite(logprobs).all()
    assert (logprobs <= 0).all()


def test_the_same_call_twice_gives_the_same_bytes(backend: Backend, ids: TokenIds) -> None:
    assert in_blocks(backend, ids[:64], 32).tobytes() == in_blocks(backend, ids[:64], 32).tobytes()


def test_blocks_of_any_size_give_the_same_scores(backend: Backend, ids: TokenIds) -> None:
    whole = in_blocks(backend, ids[:64], 64)
    for block_size in (8, 24, 33):
        np.testing.assert_allclose(in_blocks(backend, ids[:64], block_size), whole, atol=1e-3, rtol=0)


def test_only_the_last_targets_are_scored_when_context_is_read(backend: Backend, ids: TokenIds) -> None:
    inputs = inputs_of(ids[:32], backend)
    with backend.open_session() as session:
        tail = session.advance(inputs, ids[24:32], position=0, keep_from=0, shift=0)
    np.testing.assert_allclose(tail, in_blocks(backend, ids[:32], 32)[24:], atol=1e-3, rtol=0)


def test_context_can_be_read_without_scoring(backend: Backend, ids: TokenIds) -> None:
    inputs = inputs_of(ids[:40], backend)
    with backend.open_session() as session:
        assert len(session.advance(inputs[:16], ids[:0], position=0, keep_from=0, shift=0)) == 0
        rest = session.advance(inputs[16:], ids[16:40], position=16, keep_from=0, shift=0)
    np.testing.assert_allclose(rest, in_blocks(backend, ids[:40], 40)[16:], atol=1e-3, rtol=0)


def test_a_restart_forgets_everything(backend: Backend, ids: TokenIds) -> None:
    inputs = inputs_of(ids[:32], backend)
    with backend.open_session() as session:
        first = session.advance(inputs, ids[:32], position=0, keep_from=0, shift=0)
        session.restart()
        again = session.advance(inputs, ids[:32], position=0, keep_from=0, shift=0)
    assert first.tobytes() == again.tobytes()


def test_dropped_entries_are_not_seen_any_more(backend: Backend, ids: TokenIds) -> None:
    """Two beginnings that differ only where the cache is dropped."""
    changed = ids.copy()
    changed[N_SINKS + 2 : 20] = ids[40:54]

    def behind(beginning: TokenIds, keep_from: int) -> FloatArray:
        inputs = inputs_of(beginning[:32], backend)
        with backend.open_session() as session:
            session.advance(inputs[:24], beginning[:0], position=0, keep_from=0, shift=0)
            return session.advance(inputs[24:], beginning[24:32], position=24, keep_from=keep_from, shift=0)

    def difference(keep_from: int) -> float:
        return float(np.abs(behind(ids, keep_from) - behind(changed, keep_from)).mean())

    # A real model's kept entries still remember, in the deeper layers, what they saw before it was dropped.
    assert difference(22) == 0 if isinstance(backend, FakeBackend) else difference(22) < difference(0) / 2


def test_kept_entries_can_move_back_behind_the_sinks(backend: Backend, ids: TokenIds) -> None:
    inputs = inputs_of(ids[:48], backend)

    def behind(*, keep_from: int, shift: int) -> FloatArray:
        with backend.open_session() as session:
            session.advance(inputs[:32], ids[:0], position=0, keep_from=0, shift=0)
            return session.advance(inputs[32:], ids[32:48], position=32 - shift, keep_from=keep_from, shift=shift)

    if backend.model["name"] == "tiny":
        pytest.skip("random weights mind the distance to the sinks; parity/test_faults.py holds moves to the reference")
    # The distance to the sinks changes, all others stay: that matters far less than to lose the entries.
    stayed = behind(keep_from=16, shift=0)
    moved, lost = behind(keep_from=16, shift=12), behind(keep_from=31, shift=0)
    assert np.abs(moved - stayed).mean() < np.abs(lost - stayed).mean() / 2


def test_packed_documents_score_to_the_bit_as_they_do_alone(backend: Backend, ids: TokenIds) -> None:
    documents = [ids[:9], ids[20:37], ids[50:51]]
    packed = backend.score_packed(documents)
    for document, logprobs in zip(documents, packed, strict=True):
        assert logprobs.tobytes() == in_blocks(backend, document, backend.block_size).tobytes()
        assert logprobs.tobytes() == backend.score_packed([document])[0].tobytes()
    backwards = backend.score_packed(documents[::-1])[::-1]
    assert [scores.tobytes() for scores in backwards] == [scores.tobytes() for scores in packed]


def test_sessions_can_be_open_at_the_same_time(backend: Backend, ids: TokenIds) -> None:
    inputs = inputs_of(ids[:32], backend)
    expected = in_blocks(backend, ids[:32], 16)
    with backend.open_session() as first, backend.open_session() as second:
        ones = [first.advance(inputs[:16], ids[:16], position=0, keep_from=0, shift=0)]
        twos = [second.advance(inputs[:16], ids[:16], position=0, keep_from=0, shift=0)]
        ones.append(first.advance(inputs[16:], ids[16:32], position=16, keep_from=0, shift=0))
        twos.append(second.advance(inputs[16:], ids[16:32], position=16, keep_from=0, shift=0))
    assert np.concatenate(ones).tobytes() == np.concatenate(twos).tobytes() == expected.tobytes()


@pytest.mark.parametrize("backend", WITH_LOGITS, indirect=True)
def test_logits_are_those_that_the_log_probabilities_come_from(backend: Backend, ids: TokenIds) -> None:
    inputs = inputs_of(ids[:48], backend)
    with backend.open_session() as session:
        with_logits = cast(LogitsSession, session)
        with_logits.advance_with_logits(inputs[:16], ids[:16], position=0, keep_from=0, shift=0)
        logprobs, logits = with_logits.advance_with_logits(inputs[16:], ids[24:48], position=16, keep_from=0, shift=0)
        kept = logits.copy()
        session.restart()
        session.advance(inputs[:16], ids[:16], position=0, keep_from=0, shift=0)
    assert logits.dtype == np.float32
    assert logits.tobytes() == kept.tobytes(), "the array is the caller's own"
    np.testing.assert_allclose(log_softmax(logits)[np.arange(24), ids[24:48]], logprobs, atol=1e-5)
    assert logprobs.tobytes() == in_blocks_of(backend, ids[:48], [16, 48])[24:].tobytes()


def test_the_model_says_who_it_is(backend: Backend) -> None:
    assert {"name", "precision", "sha256", "backend"} <= set(backend.model)


def test_the_fake_refuses_what_breaks_the_contract() -> None:
    one = np.ones(1, np.int32)
    with FakeBackend().open_session() as session, pytest.raises(BackendError, match="position"):
        session.advance(one, one, position=5, keep_from=0, shift=0)
    with FakeBackend(context_length=4).open_session() as session, pytest.raises(BackendError, match="overflows"):
        session.advance(np.ones(5, np.int32), one, position=0, keep_from=0, shift=0)


# What the backends are for: chunks of any text.


@pytest.fixture
def chunker(backend: Backend) -> Chunker:
    return Chunker(backend, Settings(max_size=12, context_length=min(512, backend.context_length)))


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_keep_every_promise(chunker: Chunker, text: str) -> None:
    chunks = chunker.chunk(text)
    assert "".join(chunk.text for chunk in chunks) == (text if text.strip() else "")
    for chunk in chunks:
        assert text[chunk.start : chunk.end] == chunk.text
        assert chunk.n_tokens <= 12 or regex.fullmatch(r"\X", chunk.text)


def test_threads_get_the_chunks_that_one_gets(chunker: Chunker) -> None:
    texts = [TEXT[start : start + 200] for start in range(0, 160, 20)]
    expected = [chunker.chunk(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: list(chunker.chunk_iter([text])), texts)) == expected
