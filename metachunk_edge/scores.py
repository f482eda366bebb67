"""Scored sentences ↔ a file, so that a document is scored once and cut many times.

The file is JSON Lines: a header (model, scoring settings), one line per sentence with its tokens, and a last line
with counts and the SHA-256 of the text, which also tells a whole file from one that was cut short.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np

from metachunk_edge.errors import ScoresError
from metachunk_edge.scoring import ScoredSentence, ScoredTokens
from metachunk_edge.tokens import token_anchors

__all__ = ["StoredScores", "read_scores", "write_scores"]

_FORMAT = "metachunk-edge scores"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class StoredScores:
    """What a scores file says: the source's name, the model, the settings of the scoring, and the sentences."""

    source: str
    model: dict[str, Any]
    scoring: dict[str, Any]
    sentences: tuple[ScoredSentence, ...]


def write_scores(
    sentences: Iterable[ScoredSentence], file: TextIO, *, source: str, model: dict[str, Any], scoring: dict[str, Any]
) -> int:
    """Write the scores of a document, sentence by sentence, and return how many there were."""
    _write_line(file, format=_FORMAT, version=_VERSION, source=source, model=model, scoring=scoring)
    text_hash = hashlib.sha256()
    n_sentences = n_tokens = end = 0
    for sentence in sentences:
        tokens = sentence.tokens
        rows = zip(tokens.ids.tolist(), tokens.offsets.tolist(), tokens.logprobs.tolist(), strict=True)
        _write_line(
            file,
            start=sentence.start,
            end=sentence.end,
            mean_nll=sentence.mean_nll,
            tokens=[[token, *offsets, round(logprob, 6)] for token, offsets, logprob in rows],
        )
        text_hash.update(sentence.text.encode("utf-8", errors="surrogatepass"))
        n_sentences += 1
        n_tokens += len(tokens.ids)
        end = sentence.end
    _write_line(file, n_sentences=n_sentences, n_tokens=n_tokens, n_characters=end, text_sha256=text_hash.hexdigest())
    return n_sentences


def read_scores(lines: Iterable[str], text: str) -> StoredScores:
    """Return what `write_scores` wrote, put together with the text again.

    Raises:
        ScoresError: this is no scores file, it is cut short, or it was made from another text.
    """
    parsed = list(_parsed(lines))
    if not parsed or parsed[0].get("format") != _FORMAT:
        raise ScoresError("This is not a scores file: make one with `metachunk-edge score`.")
    header, *body = parsed
    if header.get("version") != _VERSION:
        raise ScoresError(f"This scores file has version {header.get('version')}; this program reads {_VERSION}.")
    if not body or "text_sha256" not in body[-1]:
        raise ScoresError("The scores file is cut short: its last line is missing. Score the document again.")
    footer = body.pop()
    text_hash = hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()
    if text_hash != footer["text_sha256"] and body:
        raise ScoresError(
            f"The scores were made from another text than this one ({footer['n_characters']} characters there, "
            f"{len(text)} here): score the document again."
        )
    try:
        sentences = tuple(_sentences(body, text))
        return StoredScores(header["source"], header["model"], header["scoring"], sentences)
    except (KeyError, TypeError, ValueError) as error:
        raise ScoresError(f"The scores file is damaged ({error}): score the document again.") from error


def _parsed(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ScoresError(f"Line {number} of the scores file is not JSON: score the document again.") from error
        if not isinstance(record, dict):
            raise ScoresError(f"Line {number} of the scores file is not an object: score the document again.")
        yield record


def _sentences(records: list[dict[str, Any]], text: str) -> Iterator[ScoredSentence]:
    rows = np.array([row for record in records for row in record["tokens"]], np.float64).reshape(-1, 4)
    ids, offsets, logprobs = rows[:, 0].astype(np.int32), rows[:, 1:3].astype(np.int64), rows[:, 3].astype(np.float32)
    anchors = token_anchors(text, offsets)
    first = 0
    for record in records:
        start, end = int(record["start"]), int(record["end"])
        last = first + len(record["tokens"])
        touching_from = int(np.searchsorted(offsets[:, 1], start, "right"))
        touching_to = int(np.searchsorted(offsets[:, 0], end, "left"))
        yield ScoredSentence(
            start=start,
            end=end,
            text=text[start:end],
            mean_nll=float(record["mean_nll"]),
            first_token=first,
            tokens=ScoredTokens(ids[first:last], offsets[first:last], anchors[first:last], logprobs[first:last]),
            first_touching=touching_from,
            touching=offsets[touching_from:touching_to],
        )
        first = last


def _write_line(file: TextIO, **record: Any) -> None:
    file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
