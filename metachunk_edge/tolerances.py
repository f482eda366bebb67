"""Which parity figures a model of each format and precision must reach: `tolerances.toml`, and the check against it."""

from __future__ import annotations

import importlib.resources
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from metachunk_edge.errors import ParityError
from metachunk_edge.parity_figures import Parity

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Tolerance", "check", "tolerance_of", "tolerances"]


_MINIMA = ("same_top", "rank_correlation", "boundary_f1", "identical_chunks")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The bounds of `Parity`'s figures of the same names; `nll` bounds the size of `nll_difference`.

    `same_top`, `rank_correlation`, `boundary_f1` and `identical_chunks` are minima, all others maxima.
    """

    mean_abs: float
    p999_abs: float
    max_abs: float
    rms_delta_p: float
    kl_mean: float
    kl_p999: float
    nll: float
    same_top: float
    rank_correlation: float
    boundary_f1: float
    identical_chunks: float

    def __add__(self, other: Tolerance) -> Tolerance:
        """What two models may be from each other that are each within a tolerance of the same reference."""
        both = {name: (getattr(self, name), getattr(other, name)) for name in self.__slots__}
        sums = {name: a + b - 1 if name in _MINIMA else a + b for name, (a, b) in both.items()}
        return Tolerance(**sums)


@cache
def tolerances() -> dict[tuple[str, str], Tolerance]:
    """Return the tolerances that come with this installation, by format ("gguf" or "onnx") and precision."""
    text = (importlib.resources.files("metachunk_edge") / "tolerances.toml").read_text(encoding="utf-8")
    return {
        (model_format, precision): Tolerance(**bounds)
        for model_format, precisions in tomllib.loads(text).items()
        for precision, bounds in precisions.items()
    }


def tolerance_of(model_format: str, precision: str) -> Tolerance:
    """Return the tolerance of a format and a precision, whose case does not matter.

    Raises:
        ParityError: there is none.
    """
    found = tolerances().get((model_format, precision.lower()))
    if found is None:
        known = ", ".join(f"{name} {known_precision}" for name, known_precision in tolerances())
        raise ParityError(f"There is no tolerance for {model_format} {precision}: there is one for {known}.")
    return found


def check(parity: Parity, tolerance: Tolerance) -> list[str]:
    """Return one line per figure that is outside the tolerance, with what was measured and what is allowed.

    A figure that is not a number is outside.
    """
    maxima: list[tuple[str, float, float, Callable[[float], str]]] = [
        ("mean |Δ ln p|", parity.mean_abs, tolerance.mean_abs, _nats),
        ("99.9th percentile of |Δ ln p|", parity.p999_abs, tolerance.p999_abs, _nats),
        ("maximum of |Δ ln p|", parity.max_abs, tolerance.max_abs, _nats),
        ("RMS Δp", parity.rms_delta_p, tolerance.rms_delta_p, _percent),
        ("mean KL divergence", parity.kl_mean, tolerance.kl_mean, _nats),
        ("99.9th percentile of the KL divergence", parity.kl_p999, tolerance.kl_p999, _nats),
        ("size of the difference of NLL", abs(parity.nll_difference), tolerance.nll, _percent),
    ]
    minima: list[tuple[str, float, float, Callable[[float], str]]] = [
        ("same most likely token", parity.same_top, tolerance.same_top, _percent),
        ("rank correlation of sentence scores", parity.rank_correlation, tolerance.rank_correlation, _number),
        ("F1 of boundaries", parity.boundary_f1, tolerance.boundary_f1, _number),
        ("identical chunks", parity.identical_chunks, tolerance.identical_chunks, _percent),
    ]
    too_large = [
        f"{label}: measured {show(measured)}, allowed at most {show(allowed)}"
        for label, measured, allowed, show in maxima
        if not measured <= allowed
    ]
    too_small = [
        f"{label}: measured {show(measured)}, allowed at least {show(allowed)}"
        for label, measured, allowed, show in minima
        if not measured >= allowed
    ]
    return too_large + too_small


def _nats(value: float) -> str:
    return f"{value:.4g} nats"


def _percent(value: float) -> str:
    return f"{100 * value:.4g} %"


def _number(value: float) -> str:
    return f"{value:.6g}"
