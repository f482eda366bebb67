r"""Text → Encoding, and tokens → the sentences that own them.

Goes in: a stream of text and a tokenizer (`backends.base.Tokenizer`: bytes in, ids and their byte lengths out).
Comes out: the token ids of the whole document with exact offsets, piece by piece.

The text is data: control-token strings in it are encoded as ordinary text. For the tokenizer alone, "\r\n"
becomes "\n" and, where the model's own tokenizer does so, the text is brought into Unicode's NFC; the offsets
still point into the original text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator

import numpy as np
import regex

from metachunk_edge.backends.base import Tokenizer
from metachunk_edge.errors import BackendError
from metachunk_edge.sentences import is_grapheme_boundary
from metachunk_edge.types import Encoding, IntArray, TokenIds

__all__ = ["encode", "encode_stream", "join_encodings", "model_text", "token_anchors"]

_PIECE_CHARACTERS = 8_192

# Where every byte-pair pre-tokenizer in use cuts for certain, and no look-ahead reaches across: behind a letter or
# digit in front of white space, or behind a letter in front of punctuation (but for the apostrophe of "it's").
_CERTAIN_CUT = regex.compile(r"(?<=[\p{L}\p{N}])(?=\s)|(?<=\p{L})(?=[.,;:!?()，。；：！？、（）「」…])")
_GRAPHEME = regex.compile(r"\X")


def encode(text: str, tokenizer: Tokenizer) -> Encoding:
    """Return the tokens of a whole text.

    Raises:
        BackendError: the tokenizer's tokens do not give the text back.
    """
    return join_encodings(encode_stream([text], tokenizer))


def encode_stream(pieces: Iterable[str], tokenizer: Tokenizer) -> Iterator[Encoding]:
    """Encode a stream of text. The ids are those of the whole document, however the stream is cut.

    The stream is cut only where the model's pre-tokenizer cuts for certain; a stretch of more than 8,192
    characters without such a place is cut at its end, since tokenizers have crashed on longer ones.
    """
    start = 0
    pending = ""
    for piece in pieces:
        for begin in range(0, len(piece), _PIECE_CHARACTERS):
            pending += piece[begin : begin + _PIECE_CHARACTERS]
            # One character more than the piece must be there: the cut looks at what follows.
            while len(pending) > _PIECE_CHARACTERS:
                cut = _last_certain_cut(pending)
                yield _encode_piece(pending[:cut], start, tokenizer)
                start += cut
                pending = pending[cut:]
    if pending:
        yield _encode_piece(pending, start, tokenizer)


def join_encodings(encodings: Iterable[Encoding]) -> Encoding:
    """Return one Encoding for consecutive ones."""
    parts = list(encodings)
    return Encoding(
        ids=np.concatenate([np.empty(0, np.int32), *(part.ids for part in parts)]),
        offsets=np.concatenate([np.empty((0, 2), np.int64), *(part.offsets for part in parts)]),
        anchors=np.concatenate([np.empty(0, np.int64), *(part.anchors for part in parts)]),
    )


def _last_certain_cut(text: str) -> int:
    for stretch in (256, 2_048, _PIECE_CHARACTERS - 1):  # most often a cut is near the end
        cuts = [match.start() for match in _CERTAIN_CUT.finditer(text, _PIECE_CHARACTERS - stretch, _PIECE_CHARACTERS)]
        if cuts:
            return cuts[-1]
    for cut in range(_PIECE_CHARACTERS, _PIECE_CHARACTERS // 2, -1):
        if is_grapheme_boundary(text, cut):
            return cut
    return _PIECE_CHARACTERS


def _encode_piece(text: str, start: int, tokenizer: Tokenizer) -> Encoding:
    readable, before = model_text(text, normalize=tokenizer.normalizes_to_nfc)
    encoded, ids, byte_lengths = _tokenize_every_byte(readable, tokenizer, at_start=start == 0)
    byte_ends = np.cumsum(byte_lengths)
    # character_at[b]: how many characters are complete in the first b bytes.
    is_start = (np.frombuffer(encoded, np.uint8) & 0xC0) != 0x80
    started = np.concatenate([[0], np.cumsum(is_start)])
    at_boundary = np.concatenate([is_start, [True]])
    starts = started[byte_ends - byte_lengths] - ~at_boundary[byte_ends - byte_lengths]
    ends = started[byte_ends]
    if before is not None:
        starts, ends = before[starts], _ends_before(before, ends)
    offsets = np.stack([starts, ends], axis=1).astype(np.int64)
    return Encoding(ids=ids, offsets=offsets + start, anchors=token_anchors(text, offsets) + start)


def _tokenize_every_byte(text: str, tokenizer: Tokenizer, *, at_start: bool) -> tuple[bytes, TokenIds, IntArray]:
    """Return the UTF-8 that the tokenizer was shown, its token ids and their byte lengths.

    A character that the vocabulary has no bytes for (some lack a few control characters) is shown as "?".
    """
    encoded = text.encode("utf-8", errors="replace")  # a lone surrogate is no text: shown as "?" too
    ids, byte_lengths = tokenizer.tokenize(encoded, at_start=at_start)
    if int(byte_lengths.sum()) != len(encoded):
        known = {character: _is_known(character, tokenizer) for character in set(text)}
        encoded = "".join(c if known[c] else "?" for c in text).encode("utf-8", errors="replace")
        ids, byte_lengths = tokenizer.tokenize(encoded, at_start=at_start)
    if int(byte_lengths.sum()) != len(encoded):
        raise BackendError(
            f"The tokenizer of {tokenizer.name} does not give a text back byte for byte: use a model with another one, "
            "such as Qwen2 or SmolLM2."
        )
    return encoded, ids, byte_lengths


def _is_known(character: str, tokenizer: Tokenizer) -> bool:
    encoded = character.encode("utf-8", errors="replace")
    return int(tokenizer.tokenize(encoded)[1].sum()) == len(encoded)


def token_anchors(text: str, offsets: IntArray) -> IntArray:
    """Return for each token its last character that is not white space, int64 [n_tokens]; its last one if all is.

    >>> token_anchors("a b", np.array([[0, 2], [2, 3]]))
    array([0, 2])
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    is_text = np.fromiter((not character.isspace() for character in text), bool, len(text))
    last_text = np.maximum.accumulate(np.concatenate([[-1], np.where(is_text, np.arange(len(text)), -1)]))
    anchors: IntArray = np.where(last_text[ends] >= starts, last_text[ends], np.maximum(ends - 1, starts))
    return anchors


def model_text(text: str, *, normalize: bool) -> tuple[str, IntArray | None]:
    r"""Return what the tokenizer is shown, and for each of its character boundaries the original's.

    The second value is int64 [n_characters + 1], or None where the text is shown as it is. A grapheme that the
    normalization changes is one step: all boundaries inside of it point to its beginning.

    >>> model_text("a\r\nb", normalize=True)
    ('a\nb', array([0, 1, 3, 4]))
    """
    changes = "\r\n" in text or (normalize and not unicodedata.is_normalized("NFC", text))
    if not changes:
        return text, None
    shown: list[str] = []
    before: list[int] = []
    for grapheme in _GRAPHEME.finditer(text):
        original = grapheme.group()
        replacement = "\n" if original == "\r\n" else original
        if normalize:
            replacement = unicodedata.normalize("NFC", replacement)
        shown.append(replacement)
        begin = grapheme.start()
        if replacement == original:
            before.extend(range(begin, begin + len(original)))
        else:
            before.extend([begin] * len(replacement))
    before.append(len(text))
    return "".join(shown), np.array(before, np.int64)


def _ends_before(before: IntArray, ends: IntArray) -> IntArray:
    """A token that ends inside a changed grapheme covers all of it."""
    next_step = np.searchsorted(before, before[np.maximum(ends - 1, 0)], side="right")
    covered: IntArray = np.where(ends > 0, before[np.minimum(next_step, len(before) - 1)], 0)
    return covered
