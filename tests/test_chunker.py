"""The Python API: one loaded model, several threads, everything in between kept."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from metachunk_edge import Chunk, Chunker, FakeBackend, ScoredSentence, Settings, SettingsError, cut

TEXT = "The first sentence is here. A second one follows it! Does a third? " * 30


def chunker(**options: object) -> Chunker:
    return Chunker(FakeBackend(), Settings(**{"context_length": 256, "max_size": 40, **options}))  # type: ignore[arg-type]


def test_analyze_keeps_everything_between_text_and_chunks() -> None:
    made = chunker()
    trace = made.analyze(TEXT)
    n_tokens, n_sentences = len(trace.encoding.ids), len(trace.alignment.sentences)
    assert trace.encoding.ids.dtype == np.int32
    assert trace.encoding.offsets.shape == (n_tokens, 2)
    assert trace.token_scores.logprobs.shape == (n_tokens,)
    assert trace.token_scores.logprobs.dtype == np.float32
    assert trace.sentence_scores.mean_nll.shape == (n_sentences,)
    assert trace.alignment.token_bounds.tolist()[0] == 0
    assert trace.alignment.token_bounds.tolist()[-1] == n_tokens
    assert len(trace.boundaries) == n_sentences
    assert trace.plan.blocks[-1].end == n_tokens
    assert list(trace.chunks) == made.chunk(TEXT)
    assert trace.model["name"] == "fake"
    assert trace.settings["max_size"] == 40
    for place, score in enumerate(trace.sentence_scores.mean_nll):
        owned = slice(trace.alignment.token_bounds[place], trace.alignment.token_bounds[place + 1])
        assert score == pytest.approx(-trace.token_scores.logprobs[owned].mean())


def test_analyze_of_a_blank_text_is_empty() -> None:
    trace = chunker().analyze(" \n ")
    assert trace.chunks == ()
    assert len(trace.encoding.ids) == 0


def test_other_settings_cut_the_same_scores_without_the_model() -> None:
    made = chunker()
    sentences = list(made.score_iter([TEXT]))
    for options in (replace(made.settings, max_size=17), replace(made.settings, merge="greedy", threshold=0.5)):
        assert list(cut(sentences, options)) == Chunker(FakeBackend(), options).chunk(TEXT)


def test_a_chunker_on_the_fake_backend_needs_no_settings() -> None:
    assert Chunker(FakeBackend()).chunk("Short text.")[0].text == "Short text."


def test_two_threads_can_use_one_chunker() -> None:
    made = chunker()
    texts = [TEXT[start:] for start in range(8)]
    expected = [made.chunk(text) for text in texts]
    found: dict[int, list[Chunk]] = {}

    def work(place: int) -> None:
        found[place] = made.chunk(texts[place]) if place % 2 else list(made.chunk_iter([texts[place]]))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(len(texts))] == expected


def test_a_stream_left_half_way_blocks_nobody() -> None:
    made = chunker()
    stream = made.chunk_iter([TEXT])
    first = next(stream)
    assert made.chunk(TEXT)[0] == first
    assert [first, *stream] == made.chunk(TEXT)


def test_many_texts_left_half_way_block_nobody() -> None:
    made = chunker()
    results = made.chunk_many([TEXT, TEXT])
    first = next(results)
    assert made.chunk(TEXT) == first == next(results)


def test_the_callback_hears_every_token_and_the_last_character() -> None:
    heard: list[tuple[int, int]] = []
    made = chunker()
    list(made.chunk_iter([TEXT], on_tokens=lambda n_tokens, character: heard.append((n_tokens, character))))
    assert sum(n_tokens for n_tokens, _ in heard) == len(made.analyze(TEXT).encoding.ids)
    assert heard[-1][1] == len(TEXT)


def test_scored_sentences_are_public_values() -> None:
    sentence = next(chunker().score_iter([TEXT]))
    assert isinstance(sentence, ScoredSentence)
    assert TEXT[sentence.start : sentence.end] == sentence.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_size": 0}, "max_size must be at least 1, got 0"),
        ({"max_size": -5}, "max_size must be at least 1, got -5"),
        ({"max_size": 2.5}, "max_size must be a whole number at least 1, got 2.5"),
        ({"max_size": 10, "min_size": 11}, r"min_size must be in \[0, 10\], got 11"),
        ({"min_size": -1}, r"min_size must be in \[0, 512\], got -1"),
        ({"max_size": 10, "overlap": 10}, r"overlap must be in \[0, 9\], got 10"),
        ({"overlap": -1}, r"overlap must be in \[0, 511\], got -1"),
        ({"overlap": "some"}, "overlap must be"),
        ({"threshold": -0.1}, "at least 0"),
        ({"threshold": float("nan")}, "at least 0"),
        ({"threshold": float("inf")}, "at least 0"),
        ({"threshold": "high"}, '"auto"'),
        ({"unit": "pages"}, "unit must be one of tokens, words, characters, got 'pages'"),
        ({"merge": "all"}, "merge must be one of none, greedy, optimal"),
        ({"method": "magic"}, "method must be one of perplexity"),
        ({"window": "sliding"}, "window must be one of rolling, strided"),
        ({"language": "English please"}, "language must be a code such as en"),
        ({"context_length": 0}, "context_length must be at least 1"),
    ],
)
def test_settings_outside_their_range_are_refused_with_the_range(options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings(**options)  # type: ignore[arg-type]


def test_a_context_longer_than_the_backends_is_refused() -> None:
    with pytest.raises(SettingsError, match="at most 256"):
        Chunker(FakeBackend(context_length=256), Settings(context_length=512))


def test_the_fingerprint_changes_with_every_setting_and_the_model() -> None:
    base = Settings()
    others = [replace(base, max_size=100), replace(base, threshold=0.5), replace(base, language="zh")]
    prints = {options.fingerprint({"name": "a"}) for options in (base, *others)} | {base.fingerprint({"name": "b"})}
    assert len(prints) == 5
    assert base.fingerprint({"name": "a"}) == Settings().fingerprint({"name": "a"})
