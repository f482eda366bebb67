"""The float32 reference, held against what transformers computes in one forward pass without a cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tiny import make_tiny_checkpoint

from metachunk_edge.backends.base import N_SINKS
from metachunk_edge.backends.hf_tokenizer import HuggingFaceTokenizer
from metachunk_edge.errors import BackendError, ModelFileError, SettingsError
from metachunk_edge.tokens import encode
from metachunk_edge.types import FloatArray, IntArray, TokenIds

if TYPE_CHECKING:
    from metachunk_edge.convert.reference import ReferenceBackend

IDS = np.random.default_rng(0).integers(0, 400, 240).astype(np.int32)
NONE = IDS[:0]
ROUNDING = 5e-5  # of logits up to 10, in float32


@pytest.fixture
def reference(reference_backend: ReferenceBackend) -> ReferenceBackend:
    return reference_backend


@pytest.fixture
def folder(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def whole_pass(reference: ReferenceBackend, ids: TokenIds, **inputs: Any) -> FloatArray:
    import torch

    with torch.inference_mode():
        logits: FloatArray = reference.network(torch.from_numpy(ids.astype(np.int64))[None], **inputs).logits[0].numpy()
    return logits


@pytest.mark.parametrize("block_size", [1, 50, 128])
def test_blocks_give_the_logits_of_one_pass(reference: ReferenceBackend, block_size: int) -> None:
    with reference.open_session() as session:
        blocks = [
            session.advance_with_logits(block, block, position=start, keep_from=0, shift=0)[1]
            for start, block in ((start, IDS[start : start + block_size]) for start in range(0, len(IDS), block_size))
        ]
    np.testing.assert_allclose(np.concatenate(blocks), whole_pass(reference, IDS), atol=ROUNDING)


def test_only_the_rows_of_the_targets_are_computed(reference: ReferenceBackend) -> None:
    with reference.open_session() as session:
        logprobs, logits = session.advance_with_logits(IDS[:20], IDS[:3], position=0, keep_from=0, shift=0)
        _, nothing = session.advance_with_logits(IDS[20:30], NONE, position=20, keep_from=0, shift=0)
    assert logprobs.shape == (3,)
    assert nothing.shape == (0, 512)
    np.testing.assert_allclose(logits, whole_pass(reference, IDS[:20])[17:], atol=ROUNDING)


def test_dropped_entries_are_as_if_a_mask_hid_them(reference: ReferenceBackend) -> None:
    import torch

    with reference.open_session() as session:
        session.advance(IDS[:80], NONE, position=0, keep_from=0, shift=0)
        _, found = session.advance_with_logits(IDS[80:120], IDS[80:120], position=80, keep_from=50, shift=0)
    mask = torch.full((120, 120), torch.finfo(torch.float32).min).triu(1)
    mask[80:, N_SINKS:50] = torch.finfo(torch.float32).min  # what was read before the drop has seen them
    np.testing.assert_allclose(
        found, whole_pass(reference, IDS[:120], attention_mask=mask[None, None])[80:], atol=ROUNDING
    )
    assert np.abs(found - whole_pass(reference, IDS[:120])[80:]).max() > 0.1, "the dropped entries matter"


def test_a_cache_that_moves_as_a_whole_gives_the_same_logits(reference: ReferenceBackend) -> None:
    """RoPE knows distances only, and no entry here is a sink."""

    def behind(position: int, shift: int) -> FloatArray:
        with reference.open_session() as session:
            session.advance(IDS[:80], NONE, position=100, keep_from=0, shift=0)
            return session.advance_with_logits(IDS[80:120], IDS[80:120], position=position, keep_from=0, shift=shift)[1]

    np.testing.assert_allclose(behind(180 - 70, shift=70), behind(180, shift=0), atol=ROUNDING)
    assert np.abs(behind(180 - 70, shift=0) - behind(180, shift=0)).max() > 0.1, "positions matter"


def test_moved_entries_are_as_if_read_at_their_new_positions(tmp_path: Path, reference: ReferenceBackend) -> None:
    """In a model of one layer, a cache entry depends on nothing but its token and its position."""
    import torch

    assert reference  # or the skip that says what is missing
    from metachunk_edge.convert.reference import ReferenceBackend

    folder = make_tiny_checkpoint(tmp_path / "one_layer", num_hidden_layers=1)
    one_layer = ReferenceBackend(folder, name="one layer", sha256="", threads=1, context_length=512)
    with one_layer.open_session() as session:
        session.advance(IDS[:80], NONE, position=0, keep_from=0, shift=0)
        _, found = session.advance_with_logits(IDS[80:120], IDS[80:120], position=50, keep_from=40, shift=30)
        session.advance(IDS[120:140], NONE, position=90, keep_from=30, shift=0)
        _, later = session.advance_with_logits(IDS[140:150], IDS[140:150], position=90, keep_from=40, shift=20)
    for logits, first, last, shift in ((found, 40, 120, 30), (later, 40 + 30, 150, 50)):
        kept = np.concatenate([IDS[:N_SINKS], IDS[first:last]])
        positions = torch.tensor([*range(N_SINKS), *range(first - shift, last - shift)])[None]
        expected = whole_pass(one_layer, kept, position_ids=positions)
        np.testing.assert_allclose(logits, expected[-len(logits) :], atol=ROUNDING)


def test_values_that_are_no_numbers_are_reported(folder: Path) -> None:
    import torch

    from metachunk_edge.convert.reference import ReferenceBackend

    backend = ReferenceBackend(folder, name="tiny", sha256="", threads=1, context_length=512)
    with torch.no_grad():
        backend.network.model.norm.weight.fill_(torch.nan)
    with backend.open_session() as session, pytest.raises(BackendError, match="not numbers"):
        session.advance(IDS[:4], IDS[:4], position=0, keep_from=0, shift=0)


def test_a_context_longer_than_the_models_is_refused(tiny_checkpoint: Path) -> None:
    from metachunk_edge.convert.reference import ReferenceBackend

    with pytest.raises(SettingsError, match="at most 1024 for tiny, got 2048"):
        ReferenceBackend(tiny_checkpoint, name="tiny", sha256="")


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    from metachunk_edge.convert.reference import ReferenceBackend

    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="cannot be loaded as a Qwen2 checkpoint"):
        ReferenceBackend(folder, name="tiny", sha256="", threads=1, context_length=512)


def test_a_checkpoint_that_lacks_a_weight_is_refused(folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    from metachunk_edge.convert.reference import ReferenceBackend

    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"lacks 1 weights, such as model\.norm\.weight"):
        ReferenceBackend(folder, name="tiny", sha256="", threads=1, context_length=512)


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    from metachunk_edge.convert.reference import ReferenceBackend

    change_json(folder / "config.json", intermediate_size=128)
    with pytest.raises(ModelFileError, match="cannot be loaded as a Qwen2 checkpoint"):
        ReferenceBackend(folder, name="tiny", sha256="", threads=1, context_length=512)


# The tokenizer


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")


def tokenized(folder: Path, text: str) -> tuple[TokenIds, IntArray]:
    return HuggingFaceTokenizer(folder, "tiny").tokenize(text.encode())


@pytest.mark.parametrize(
    "text", ["plain", "Café 今天 \U0001f44b\U0001f3fd", "<|im_end|> <|endoftext|>", "a<tool_call>b", "\x00\r\n\ufeff"]
)
def test_byte_lengths_add_up(folder: Path, text: str) -> None:
    ids, lengths = tokenized(folder, text)
    assert ids.dtype == np.int32
    assert lengths.sum() == len(text.encode())


def test_control_tokens_in_a_text_are_ordinary_text(folder: Path) -> None:
    assert tokenized(folder, "<|im_end|>")[0].max() < 400


def test_other_added_tokens_are_matched_as_everywhere(folder: Path) -> None:
    ids, lengths = tokenized(folder, "<tool_call>")
    assert ids.tolist() == [403]
    assert lengths.tolist() == [len("<tool_call>")]


def test_a_text_is_encoded_in_nfc_with_offsets_into_the_original(folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer(folder, "tiny")
    composed, decomposed = encode("Café au lait", tokenizer), encode("Cafe\u0301 au lait", tokenizer)
    assert composed.ids.tolist() == decomposed.ids.tolist()
    assert composed.offsets[-1, 1] + 1 == decomposed.offsets[-1, 1]


def test_the_prefix_is_the_token_that_begins_a_text_else_the_one_that_ends_it(folder: Path) -> None:
    change_json(folder / "config.json", bos_token_id=7)
    assert HuggingFaceTokenizer(folder, "tiny").prefix_id == 7
    change_json(folder / "config.json", bos_token_id=None)
    assert HuggingFaceTokenizer(folder, "tiny").prefix_id == 400


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "WordPiece", "vocab": {"a": 0}}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"normalizer": {"type": "Lowercase"}},
    ],
)
def test_a_tokenizer_that_does_not_give_every_text_back_is_refused(folder: Path, change: dict[str, Any]) -> None:
    change_json(folder / "tokenizer.json", **change)
    with pytest.raises(ModelFileError, match="use a model with byte-level BPE"):
        HuggingFaceTokenizer(folder, "tiny")


@pytest.mark.parametrize("content", ["", "[]", '{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_refused(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        HuggingFaceTokenizer(folder, "tiny")


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is missing"):
        HuggingFaceTokenizer(folder, "tiny")
