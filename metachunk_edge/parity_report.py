"""Parity figures as a table for a terminal, as Markdown, and as values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from metachunk_edge.parity_figures import Parity
from metachunk_edge.settings import Settings

__all__ = ["ParityRow", "to_markdown", "to_table"]


@dataclass(frozen=True, slots=True)
class ParityRow:
    """One comparison: a model's identity, how it was run, what was measured, and what is outside the tolerance.

    `model["block_size"]` is the block size of the comparison. `failures` is None where there is no tolerance for the
    model's precision.
    """

    model: dict[str, Any]
    settings: Settings
    parity: Parity
    failures: tuple[str, ...] | None

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {
            "model": self.model,
            "settings": self.settings.as_dict(),
            "parity": asdict(self.parity),
            "failures": None if self.failures is None else list(self.failures),
        }


def to_table(rows: Sequence[ParityRow]) -> str:
    """Return a table with one line per figure and one column per comparison, for a terminal."""
    columns = [_cells(row) for row in rows]
    labels = list(_cells(rows[0])) if rows else []
    table = [[label, *(column[label] for column in columns)] for label in labels]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in table
    )


def to_markdown(rows: Sequence[ParityRow]) -> str:
    """Return a Markdown table with one line per comparison."""
    if not rows:
        return ""
    labels = list(_cells(rows[0]))
    lines = [labels, ["---"] * len(labels), *(list(_cells(row).values()) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def _cells(row: ParityRow) -> dict[str, str]:
    parity = row.parity
    return {
        "model": str(row.model["name"]),
        "precision": str(row.model["precision"] or "unknown"),
        "backend": str(row.model["backend"]),
        "device": str(row.model.get("device", "")),
        "window": f"{row.settings.window} {row.settings.context_length}",
        "block": str(row.model.get("block_size", "")),
        "tokens": f"{parity.n_tokens:,}",
        "sentences": f"{parity.n_sentences:,}",
        "|Δ ln p| mean (nats)": f"{parity.mean_abs:.3g}",
        "|Δ ln p| 99.9 % (nats)": f"{parity.p999_abs:.3g}",
        "|Δ ln p| max (nats)": f"{parity.max_abs:.3g}",
        "RMS Δp (%)": f"{100 * parity.rms_delta_p:.3g}",
        "KL mean (nats)": f"{parity.kl_mean:.3g}",
        "KL 99.9 % (nats)": f"{parity.kl_p999:.3g}",
        "KL max (nats)": f"{parity.kl_max:.3g}",
        "same top token (%)": f"{100 * parity.same_top:.2f}",
        "NLL difference (%)": f"{100 * parity.nll_difference:+.3g}",
        "rank correlation": f"{parity.rank_correlation:.4f}",
        "boundary F1": f"{parity.boundary_f1:.3f}",
        "identical chunks (%)": f"{100 * parity.identical_chunks:.1f}",
        "tolerance": _verdict(row.failures),
    }


def _verdict(failures: tuple[str, ...] | None) -> str:
    if failures is None:
        return "none set"
    return f"{len(failures)} outside" if failures else "within"
