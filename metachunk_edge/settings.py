"""What a user can set. One frozen object, checked when it is made, recorded with every result."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from metachunk_edge.errors import SettingsError

__all__ = ["Merge", "Method", "Settings", "Unit", "Window"]

_LANGUAGE = re.compile(r"auto|[a-z]{2,3}([-_][a-z0-9]+)*", re.IGNORECASE)

Unit = Literal["tokens", "words", "characters"]
Method = Literal["perplexity"]
Merge = Literal["none", "greedy", "optimal"]
Window = Literal["rolling", "strided"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How documents are scored and cut.

    Attributes:
        max_size: no chunk is larger, in `unit`; only a single grapheme that is by itself stands alone.
        min_size: `merge="optimal"` makes no smaller chunk where the text allows it. None: a quarter of `max_size`.
        unit: "tokens" of the model; "words", where a Chinese or Japanese character counts as one and a word has at
            most 64 characters; or "characters" (Unicode code points).
        method: how boundaries are found: "perplexity" cuts after sentences that the model finds easy to predict.
        threshold: how far a sentence's score must drop below its neighbours', in nats; "auto" moves with the text.
        merge: "none" leaves the pieces between boundaries as they are, "greedy" joins them while they fit (the
            paper's rule), "optimal" finds the best way to join them (see `merge.py`).
        overlap: "none"; "dynamic" repeats the sentence at a minimum in the chunk behind it; or the number of
            sentences to repeat. The repeated part counts towards `max_size` and is shortened where it does not fit.
        language: a language code for the sentence splitter, or "auto"; it splits languages it does not know as English.
        window: "rolling" or "strided" (see `windows.py`).
        context_length: how many tokens a token may see, in the model's KV cache.

    Raises:
        SettingsError: a value is outside its range.
    """

    max_size: int = 512
    min_size: int | None = None
    unit: Unit = "tokens"
    method: Method = "perplexity"
    threshold: float | Literal["auto"] = 0.0
    merge: Merge = "optimal"
    overlap: int | Literal["none", "dynamic"] = "none"
    language: str = "auto"
    window: Window = "rolling"
    context_length: int = 2_048

    def __post_init__(self) -> None:
        """Check every value against its range."""
        for name, choices in (("unit", Unit), ("method", Method), ("merge", Merge), ("window", Window)):
            if getattr(self, name) not in get_args(choices):
                raise SettingsError(f"{name} must be one of {_listed(get_args(choices))}, got {getattr(self, name)!r}")
        _check_integer("max_size", self.max_size, 1, None)
        if self.min_size is not None:
            _check_integer("min_size", self.min_size, 0, self.max_size)
        _check_integer("context_length", self.context_length, 1, None)
        if not (isinstance(self.language, str) and _LANGUAGE.fullmatch(self.language)):
            raise SettingsError(f'language must be a code such as en, zh or pt-br, or "auto", got {self.language!r}')
        if self.overlap not in ("none", "dynamic"):
            _check_integer("overlap", self.overlap, 0, self.max_size - 1)
        if self.threshold != "auto" and not (_is_number(self.threshold) and 0 <= self.threshold < math.inf):
            raise SettingsError(f'threshold must be a number of nats, at least 0, or "auto", got {self.threshold!r}')

    @property
    def smallest(self) -> int:
        """The minimum size in force: `min_size`, else a quarter of `max_size`."""
        return self.max_size // 4 if self.min_size is None else self.min_size

    def as_dict(self) -> dict[str, Any]:
        """Return all settings, for the record."""
        return asdict(self)

    def scoring(self) -> dict[str, Any]:
        """Return the settings that the scores depend on; the others only decide where to cut."""
        return {name: getattr(self, name) for name in ("language", "window", "context_length")}

    def fingerprint(self, model: dict[str, Any]) -> str:
        """Return 16 hexadecimal digits that stand for these settings and the model."""
        record = json.dumps([self.as_dict(), model], sort_keys=True)
        return hashlib.sha256(record.encode()).hexdigest()[:16]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_integer(name: str, value: object, lowest: int, highest: int | None) -> None:
    valid = f"at least {lowest}" if highest is None else f"in [{lowest}, {highest}]"
    if not isinstance(value, int) or isinstance(value, bool):
        raise SettingsError(f"{name} must be a whole number {valid}, got {value!r}")
    if value < lowest or (highest is not None and value > highest):
        raise SettingsError(f"{name} must be {valid}, got {value}")


def _listed(choices: tuple[Any, ...]) -> str:
    return ", ".join(str(choice) for choice in choices)
