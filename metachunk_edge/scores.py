"""Scored sentences ↔ a file, so that a document is scored once and cut many times.

The file is JSON Lines: a header (model, scoring settings), one line per sentence with its tokens (id, start, end,
logprob), and a last line with the SHA-256 of the text and of the lines before it: what is cut short, altered or of
another text is never cut from.
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
    file_hash, text_hash = hashlib.sha256(), hashlib.sha256()
    n_sentences = end = 0

    def write(**record: Any) -> None:
        line = json.dumps(record, separators=(",", ":")) + "\n"
        file_hash.update(line.encode("ascii"))
        file.write(line)

    write(format=_FORMAT, version=_VERSION, source=source, model=model, scoring=scoring)
    for sentence in sentences:
        tokens = sentence.tokens
        # As text and back: the shortest number that is the same in float32.
        logprobs = map(float, tokens.logprobs.astype(np.str_).tolist())
        rows = zip(tokens.ids.tolist(), tokens.offsets.tolist(), logprobs, strict=True)
        write(
            start=sentence.start,
            end=sentence.end,
            mean_nll=sentence.mean_nll,
            tokens=[[token, *offsets, logprob] for token, offsets, logprob in rows],
        )
        text_hash.update(_encoded(sentence.text))
        n_sentences += 1
        end = sentence.end
    write(n_characters=end, text_sha256=text_hash.hexdigest(), sha256=file_hash.hexdigest())
    return n_sentences


def read_scores(lines: Iterable[str], text: str) -> StoredScores:
    """Return what `write_scores` wrote, put together with the text again.

    Raises:
        ScoresError: this is no scores file, it is cut short or altered, or it was made from another text.
    """
    *body, last = [line.rstrip("\r\n") for line in lines] or [""]
    header, footer = _record(body[0] if body else last), _record(last)
    if header.get("format") != _FORMAT:
        raise ScoresError("This is not a scores file: make one with `metachunk-edge score`.")
    if header.get("version") != _VERSION:
        raise ScoresError(
            f"This scores file has version {header.get('version')} and this program reads {_VERSION}: "
            "score the document again."
        )
    if "sha256" not in footer:
        raise ScoresError("The scores file is cut short, its last line is missing: score the document again.")
    if footer["sha256"] != hashlib.sha256(_encoded("".join(f"{line}\n" for line in body))).hexdigest():
        raise ScoresError("The scores file was altered after it was written: score the document again.")
    scored_text = text if text.strip() else ""  # a blank text has no sentences
    if footer.get("text_sha256") != hashlib.sha256(_encoded(scored_text)).hexdigest():
        raise ScoresError(
            f"The scores were made from another text than this one ({footer.get('n_characters')} characters there, "
            f"{len(scored_text)} here): score the document again."
        )
    sentences = tuple(_sentences([json.loads(line) for line in body[1:]], text))
    return StoredScores(header["source"], header["model"], header["scoring"], sentences)


def _record(line: str) -> dict[str, Any]:
    """The object in a line; an empty one where it holds none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogatepass")


def _sentences(records: list[dict[str, Any]], text: str) -> Iterator[ScoredSentence]:
    rows = np.array([row for record in records for row in record["tokens"]], np.float64).reshape(-1, 4)
    ids, offsets, logprobs = rows[:, 0].astype(np.int32), rows[:, 1:3].astype(np.int64), rows[:, 3].astype(np.float32)
    anchors = token_anchors(text, offsets)
    starts = np.array([record["start"] for record in records], np.int64)
    ends = np.array([record["end"] for record in records], np.int64)
    touching_from = np.searchsorted(offsets[:, 1], starts, "right").tolist()
    touching_to = np.searchsorted(offsets[:, 0], ends, "left").tolist()
    first = 0
    for record, begin, end in zip(records, touching_from, touching_to, strict=True):
        last = first + len(record["tokens"])
        yield ScoredSentence(
            start=record["start"],
            end=record["end"],
            text=text[record["start"] : record["end"]],
            mean_nll=record["mean_nll"],
            first_token=first,
            tokens=ScoredTokens(ids[first:last], offsets[first:last], anchors[first:last], logprobs[first:last]),
            first_touching=begin,
            touching=offsets[begin:end],
        )
        first = last
