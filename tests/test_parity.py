"""The parity figures, by hand-computed values and properties, and the comparison on a backend without weights."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from conftest import REPOSITORY
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from metachunk_edge import FakeBackend, Settings, SettingsError
from metachunk_edge.backends.base import N_SINKS
from metachunk_edge.backends.reduce import reduce_logits
from metachunk_edge.cache import ModelFile
from metachunk_edge.cli import main
from metachunk_edge.errors import ParityError
from metachunk_edge.parity import Parity, check, compare, first_tokens, record, tolerance_of
from metachunk_edge.parity_figures import boundary_f1, kl_divergence, log_softmax, rank_correlation, share_found
from metachunk_edge.parity_report import ParityRow, to_markdown, to_table
from metachunk_edge.tolerances import Tolerance, tolerances
from metachunk_edge.types import FloatArray, IntArray, TokenIds

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEXTS = ["One sentence. Another one follows! A third? And so it goes on and on. " * 4, "Short. Very short."]
SETTINGS = Settings(context_length=64, max_size=40)
EXACT = Parity(120, 9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0)
LOGITS = arrays(np.float64, (2, 7), elements=st.floats(-20, 20))


# A backend without weights whose vocabulary is small enough for whole distributions: one token per byte.


class ByteTokenizer:
    name = "bytes"
    normalizes_to_nfc = False
    prefix_id = 256

    def __init__(self, first_id: int) -> None:
        self._first_id = first_id

    def tokenize(self, text: bytes, *, at_start: bool = True) -> tuple[TokenIds, IntArray]:  # noqa: ARG002
        ids = (np.frombuffer(text, np.uint8).astype(np.int32) + self._first_id) % 256
        return ids, np.ones(len(ids), np.int64)


class ByteBackend:
    """Each row of logits is drawn from a generator seeded by the last token in the cache, with noise on top."""

    def __init__(
        self,
        *,
        noise: float = 0.0,
        first_id: int = 0,
        prefix_id: int = 256,
        n_vocabulary: int = 257,
        position_limit: int = 1_024,
    ) -> None:
        self.tokenizer = ByteTokenizer(first_id)
        self.tokenizer.prefix_id = prefix_id
        self.model: dict[str, Any] = {"name": "bytes", "precision": None, "sha256": "", "backend": "bytes"}
        self.block_size = 30
        self.row_multiple = 1
        self.context_length = 64
        self.position_limit = position_limit
        generator = np.random.default_rng(0)
        table = generator.normal(0, 3, (257, n_vocabulary))
        self.table: FloatArray = (table + noise * generator.normal(0, 1, table.shape)).astype(np.float32)

    def open_session(self) -> ByteSession:
        return ByteSession(self.table)

    def score_packed(self, documents: Sequence[TokenIds]) -> list[FloatArray]:
        raise NotImplementedError


class ByteSession:
    def __init__(self, table: FloatArray) -> None:
        self._table = table

    def __enter__(self) -> ByteSession:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def restart(self) -> None:
        pass

    def advance(self, ids: TokenIds, targets: TokenIds, *, position: int, keep_from: int, shift: int) -> FloatArray:
        return self.advance_with_logits(ids, targets, position=position, keep_from=keep_from, shift=shift)[0]

    def advance_with_logits(
        self,
        ids: TokenIds,
        targets: TokenIds,
        *,
        position: int,  # noqa: ARG002
        keep_from: int,  # noqa: ARG002
        shift: int,  # noqa: ARG002
    ) -> tuple[FloatArray, FloatArray]:
        logits = self._table[ids[len(ids) - len(targets) :]]
        return reduce_logits(logits, targets, np.empty((4, logits.shape[1]), np.float32)), logits


def parity_of(
    tmp_path: Path, model: ByteBackend, *, reference: ByteBackend | None = None, window: str = "rolling"
) -> Parity:
    settings = replace(SETTINGS, window=window)  # type: ignore[arg-type]
    recording = record(reference or ByteBackend(), TEXTS, settings, block_size=20, path=tmp_path / "distributions")
    return compare(recording, model)


# The figures


def test_the_divergence_is_that_of_the_explicit_formula() -> None:
    p, q = [0.7, 0.2, 0.1], [0.5, 0.25, 0.25]
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert kl_divergence(np.log([p]), np.log([q]))[0] == pytest.approx(expected, rel=1e-12)
    assert expected == pytest.approx(0.7 * 0.33647224 - 0.2 * 0.22314355 - 0.1 * 0.91629073)


@given(reference=LOGITS, model=LOGITS)
def test_the_divergence_is_never_negative(reference: Any, model: Any) -> None:
    assert (kl_divergence(reference, model) >= -1e-12).all()
    assert np.abs(kl_divergence(reference, reference)).max() == 0


@given(logits=LOGITS, offset=st.floats(-50, 50))
def test_the_divergence_is_that_of_distributions_however_they_are_written(logits: Any, offset: float) -> None:
    assert np.abs(kl_divergence(logits, logits + offset)).max() <= 1e-12
    assert np.abs(kl_divergence(logits, log_softmax(logits))).max() <= 1e-12


def test_the_rank_correlation_knows_order_only_and_shares_ranks() -> None:
    values = np.array([1.0, 5.0, 2.0, 9.0])
    assert rank_correlation(values, np.exp(values)) == pytest.approx(1)
    assert rank_correlation(values, -values) == pytest.approx(-1)
    # Ranks 1, 2, 3, 4 and 1.5, 1.5, 3, 4: the covariance is 4.5 / 4, the variances 5 / 4 and 4.5 / 4.
    assert rank_correlation(np.array([1.0, 2, 3, 4]), np.array([7.0, 7, 8, 9])) == pytest.approx(math.sqrt(4.5 / 5))


def test_the_rank_correlation_of_values_without_order() -> None:
    one, ordered = np.array([3.0]), np.array([1.0, 2.0])
    assert rank_correlation(one, one) == 1
    assert rank_correlation(ordered, np.array([1.0, 1.0])) == 0


@given(boundaries=st.sets(st.integers(0, 50)), others=st.sets(st.integers(0, 50)))
def test_boundaries_agree_with_themselves_and_symmetrically(boundaries: set[int], others: set[int]) -> None:
    assert boundary_f1(boundaries, boundaries) == 1
    assert boundary_f1(boundaries, others) == boundary_f1(others, boundaries)
    assert 0 <= boundary_f1(boundaries, others) <= 1
    assert share_found(boundaries, boundaries | others) == 1


def test_boundaries_and_chunks_by_hand() -> None:
    # Precision 2 of 4, recall 2 of 3.
    assert boundary_f1({1, 2, 3}, {2, 3, 4, 5}) == pytest.approx(2 * (1 / 2) * (2 / 3) / (1 / 2 + 2 / 3))
    assert boundary_f1({1}, {2}) == 0
    assert share_found({(0, 5), (5, 9), (9, 12), (12, 20)}, {(0, 5), (5, 12), (12, 20)}) == 0.5


# The comparison


@pytest.mark.parametrize("window", ["rolling", "strided"])
def test_a_model_is_exactly_itself(tmp_path: Path, window: str) -> None:
    parity = parity_of(tmp_path, ByteBackend(), window=window)
    assert parity.n_tokens == sum(len(text) for text in TEXTS)
    exact = replace(EXACT, n_tokens=parity.n_tokens, n_sentences=parity.n_sentences)
    rounded = replace(
        parity, kl_mean=round(parity.kl_mean, 12), kl_p999=round(parity.kl_p999, 12), kl_max=round(parity.kl_max, 12)
    )
    assert rounded == exact


def test_the_figures_of_noise_are_those_computed_at_once(tmp_path: Path) -> None:
    """One text, one block after the other, against the same figures from all distributions together."""
    parity = parity_of(tmp_path, ByteBackend(noise=0.3))
    reference, model = ByteBackend().table.astype(np.float64), ByteBackend(noise=0.3).table.astype(np.float64)
    inputs = [[256, *text.encode()[:-1]] for text in TEXTS]
    rows = np.concatenate([np.array(ids) for ids in inputs])
    targets = np.concatenate([np.frombuffer(text.encode(), np.uint8) for text in TEXTS])
    p, q = (np.exp(table) / np.exp(table).sum(axis=1, keepdims=True) for table in (reference, model))
    expected_kl = (p * np.log(p / q)).sum(axis=1)[rows]
    off = np.log(q[rows, targets]) - np.log(p[rows, targets])
    nll = -np.log(p[rows, targets]).sum()
    assert parity.mean_abs == pytest.approx(np.abs(off).mean(), abs=1e-6)
    assert parity.max_abs == pytest.approx(np.abs(off).max(), abs=1e-5)
    assert parity.p999_abs == pytest.approx(np.quantile(np.abs(off), 0.999), abs=1e-5)
    assert parity.rms_delta_p == pytest.approx(np.sqrt(((q - p)[rows, targets] ** 2).mean()), rel=1e-4)
    assert parity.kl_mean == pytest.approx(expected_kl.mean(), rel=1e-5)
    assert parity.kl_max == pytest.approx(expected_kl.max(), rel=1e-5)
    assert parity.same_top == (p.argmax(axis=1) == q.argmax(axis=1))[rows].mean()
    assert parity.nll_difference == pytest.approx(-off.sum() / nll, rel=1e-4)


def test_the_file_holds_the_log_probabilities_of_every_token_once(tmp_path: Path) -> None:
    recording = record(ByteBackend(), TEXTS, SETTINGS, block_size=20, path=tmp_path / "distributions")
    n_tokens = sum(len(text.ids) for text in recording.texts)
    assert recording.distributions.shape == (n_tokens, 257)
    assert recording.distributions.dtype == np.float32
    ids = np.concatenate([text.ids for text in recording.texts])
    logprobs = np.concatenate([text.logprobs for text in recording.texts])
    np.testing.assert_allclose(recording.distributions[np.arange(n_tokens), ids], logprobs, atol=1e-5)


def test_other_ids_are_refused_with_the_first_token_that_differs(tmp_path: Path) -> None:
    reference = record(ByteBackend(), ["aaaa bbbb"], SETTINGS, block_size=20, path=tmp_path / "distributions")

    class Backend(ByteBackend):
        def __init__(self) -> None:
            super().__init__()
            self.tokenizer = AnotherLetter(0)

    class AnotherLetter(ByteTokenizer):
        def tokenize(self, text: bytes, *, at_start: bool = True) -> tuple[TokenIds, IntArray]:
            return super().tokenize(text.replace(b"b", b"c"), at_start=at_start)

    with pytest.raises(ParityError, match="token 5 is 99 for the model and 98 for the reference"):
        compare(reference, Backend())


def test_another_prefix_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="before token 0 differ: they begin with 7 for the model and 256"):
        parity_of(tmp_path, ByteBackend(prefix_id=7))


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="vocabularies differ"):
        parity_of(tmp_path, ByteBackend(n_vocabulary=300))


def test_another_window_plan_is_refused_with_the_token(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match=r"the block that scores token \d+ has .*'shift': 0.* and .*'shift': 16"):
        parity_of(tmp_path, ByteBackend(), reference=ByteBackend(position_limit=64 + N_SINKS))


@pytest.mark.parametrize("change", [lambda ids: ids[:-1], lambda ids: np.append(ids, ids[-1:])])
def test_a_different_number_of_ids_is_refused(tmp_path: Path, change: Callable[[TokenIds], TokenIds]) -> None:
    recording = record(ByteBackend(), TEXTS, SETTINGS, block_size=20, path=tmp_path / "distributions")
    text = recording.texts[0]
    last = text.calls[-1]
    calls = (*text.calls[:-1], replace(last, targets=change(last.targets)))
    changed = replace(text, calls=calls, ids=change(text.ids))
    with pytest.raises(ParityError, match="token ids differ"):
        compare(replace(recording, texts=(changed, *recording.texts[1:])), ByteBackend())


def test_a_backend_without_logits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="fake cannot hand out logits"):
        record(FakeBackend(), TEXTS, SETTINGS, block_size=20, path=tmp_path / "distributions")


def test_blocks_that_the_backend_does_not_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"block_size must be in \[1, 30\] for bytes, got 31"):
        record(ByteBackend(), TEXTS, SETTINGS, block_size=31, path=tmp_path / "distributions")


def test_texts_without_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="empty or blank"):
        record(ByteBackend(), ["", " \n"], SETTINGS, block_size=20, path=tmp_path / "distributions")


def test_the_first_tokens_of_a_text() -> None:
    assert first_tokens("abcdef", ByteBackend().tokenizer, 4) == "abcd"
    assert first_tokens("abcdef", ByteBackend().tokenizer, 9) == "abcdef"


# Tolerances


def test_an_exact_model_is_within_every_tolerance() -> None:
    for tolerance in tolerances().values():
        assert check(EXACT, tolerance) == []


def test_every_figure_of_a_tolerance_is_checked() -> None:
    """A model whose figures are all bad is outside in as many ways as there are bounds."""
    values: dict[str, Any] = {name: 99.0 if value == 0 else -1.0 for name, value in asdict(EXACT).items()}
    found = check(Parity(**values), tolerance_of("gguf", "q4_k_m"))
    assert len(found) == len(fields(Tolerance))


def test_a_failure_says_what_was_measured_and_what_is_allowed() -> None:
    tolerance = replace(tolerance_of("onnx", "float32"), mean_abs=0.01, same_top=0.999)
    found = check(replace(EXACT, mean_abs=0.05, same_top=0.9), tolerance)
    assert found == [
        "mean |Δ ln p|: measured 0.05 nats, allowed at most 0.01 nats",
        "same most likely token: measured 90 %, allowed at least 99.9 %",
    ]


def test_a_model_that_is_too_good_by_its_nll_is_outside_too() -> None:
    (found,) = check(replace(EXACT, nll_difference=-0.5), tolerance_of("gguf", "q4_0"))
    assert found.startswith("size of the difference of NLL: measured 50 %")


def test_a_figure_that_is_not_a_number_is_outside() -> None:
    assert len(check(replace(EXACT, kl_mean=math.nan), tolerance_of("gguf", "q4_0"))) == 1


def test_a_precision_is_found_in_any_case_and_an_unknown_one_refused() -> None:
    assert tolerance_of("gguf", "Q4_K_M") == tolerances()["gguf", "q4_k_m"]
    with pytest.raises(ParityError, match=r"no tolerance for gguf Q3_K_S: there is one for gguf f32"):
        tolerance_of("gguf", "Q3_K_S")


# Reports


ROW = ParityRow({"name": "tiny", "precision": "Q8_0", "backend": "llama.cpp", "device": "cpu"}, SETTINGS, EXACT, ())


def test_a_table_has_one_column_per_comparison_and_lines_of_one_width() -> None:
    other = replace(ROW, model={**ROW.model, "name": "a much longer name"}, failures=("one", "two"))
    lines = to_table([ROW, other, replace(ROW, failures=None)]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["model", "tiny", "a", "much", "longer", "name", "tiny"]
    assert lines[-1].split() == ["tolerance", "within", "2", "outside", "none", "set"]


def test_markdown_has_one_line_per_comparison_and_no_stray_bars() -> None:
    lines = to_markdown([ROW, ROW]).splitlines()
    assert len(lines) == 4
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_a_row_for_json_holds_everything() -> None:
    assert ROW.as_dict() == {
        "model": ROW.model,
        "settings": SETTINGS.as_dict(),
        "parity": asdict(EXACT),
        "failures": [],
    }


def test_the_command_refuses_a_reference_that_is_not_there() -> None:
    result = CliRunner().invoke(main, ["parity", "nothing.gguf", "--reference", "nothing.gguf"])
    assert result.exit_code == 1
    assert "There is no model file at" in result.output


def run_command(model: ModelFile, reference: Path, *options: str) -> Result:
    arguments = ["parity", str(model.path.parent), "--reference", str(reference), "--tokens", "80", "--threads", "1"]
    return CliRunner().invoke(main, [*arguments, "--context-length", "512", "--device", "cpu", *options])


def test_the_command_writes_a_table_json_and_markdown(
    tiny_checkpoint: Path, tiny_model: Callable[[str], ModelFile], tmp_path: Path
) -> None:
    model = tiny_model("float32")
    files = ("--json", str(tmp_path / "parity.json"), "--markdown", str(tmp_path / "parity.md"))
    result = run_command(model, tiny_checkpoint, *files)
    assert result.exit_code == 0, result.output
    assert "The reference is the checkpoint in float32." in result.output
    report = json.loads((tmp_path / "parity.json").read_text(encoding="utf-8"))
    assert report["reference"]["dequantized"] is False
    (comparison,) = report["comparisons"]
    assert comparison["model"]["sha256"] == model.sha256
    assert comparison["parity"]["n_tokens"] == 160
    assert comparison["failures"] == []
    assert "| tiny | float32 |" in (tmp_path / "parity.md").read_text(encoding="utf-8")


def test_the_command_fails_with_what_was_measured_and_allowed(
    tiny_checkpoint: Path, tiny_model: Callable[[str], ModelFile]
) -> None:
    result = run_command(tiny_model("q6_k"), tiny_checkpoint)  # random weights do not bear so few bits
    assert result.exit_code == 1
    assert re.search(r"tiny \(q6_k\): mean KL divergence: measured .* nats, allowed at most .* nats", result.output)


def test_the_command_says_that_a_reference_is_dequantized(tiny_model: Callable[[str], ModelFile]) -> None:
    model = tiny_model("q8_0")
    result = run_command(model, model.path)
    assert "The reference is dequantized" in result.output


def test_the_tolerances_are_made_from_what_was_measured() -> None:
    sys.path.insert(0, str(REPOSITORY))
    benchmark = pytest.importorskip("benchmarks.parity", reason="benchmarks/ or the extra `convert` is not there")
    rows = json.loads((REPOSITORY / "benchmarks" / "parity.json").read_text(encoding="utf-8"))
    made = tomllib.loads(benchmark._tolerances(rows))
    assert {
        (model_format, precision): Tolerance(**bounds)
        for model_format, precisions in made.items()
        for precision, bounds in precisions.items()
    } == tolerances()
