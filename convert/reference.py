"""The yardstick: a Qwen2 checkpoint in float32 through PyTorch, in the plainest possible code.

It obeys `backends.base.Backend` with sessions that hand out logits. What every other backend computes is held against
it; it is slow and no product.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from metachunk_edge.backends.base import N_SINKS
from metachunk_edge.backends.devices import default_threads
from metachunk_edge.backends.hf_tokenizer import HuggingFaceTokenizer
from metachunk_edge.backends.reduce import reduce_logits
from metachunk_edge.errors import MissingExtraError, ModelFileError, SettingsError
from metachunk_edge.types import FloatArray, TokenIds

try:
    import torch
    import transformers
    from transformers import DynamicCache, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled
except ImportError as error:
    raise MissingExtraError(
        f"The float32 reference needs PyTorch and transformers ({error}): run pip install 'metachunk-edge[convert]'."
    ) from error

__all__ = ["ReferenceBackend"]

BLOCK_SIZE = 128
_ROWS_AT_ONCE = 4


class ReferenceBackend:
    """See `backends.base.Backend`. The scores are those of `transformers`, to float32's rounding.

    Args:
        folder: a Hugging Face checkpoint with config, weights and tokenizer.json.
        name: what results call the model.
        sha256: the checksum of what the checkpoint was made from.
        threads: CPU threads, of the whole process; None: one per physical core that it may use.
        context_length: how many entries the KV cache holds.
        tokenizer: the checkpoint's, if its folder has no tokenizer.json.

    Raises:
        ModelFileError: the folder is no Qwen2 checkpoint, or it is incomplete.
        SettingsError: the model was not trained on so long a context.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        sha256: str,
        threads: int | None = None,
        context_length: int = 2_048,
        tokenizer: HuggingFaceTokenizer | None = None,
    ) -> None:
        if threads is not None and threads < 1:
            raise SettingsError(f"threads must be at least 1, got {threads}")
        torch.set_num_threads(threads or default_threads())
        self.tokenizer = tokenizer or HuggingFaceTokenizer(folder, name)
        self.network = _load(folder)
        self.block_size = BLOCK_SIZE
        self.row_multiple = 1
        self.context_length = context_length
        self.position_limit: int = self.network.config.max_position_embeddings
        self._sha256 = sha256
        if context_length > self.position_limit:
            raise SettingsError(
                f"context_length must be at most {self.position_limit} for {name}, got {context_length}"
            )

    @property
    def model(self) -> dict[str, Any]:
        """What is recorded with each result."""
        return {
            "name": self.tokenizer.name,
            "precision": "float32",
            "sha256": self._sha256,
            "backend": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "device": "cpu",
            "threads": torch.get_num_threads(),
            "block_size": self.block_size,
        }

    def open_session(self) -> ReferenceSession:
        """Return a session with a KV cache of its own."""
        return ReferenceSession(self.network)

    def score_packed(self, documents: Sequence[TokenIds]) -> list[FloatArray]:
        """Score one document after the other, each in a session of its own."""
        prefix = np.array([self.tokenizer.prefix_id], np.int32)
        scores = []
        for ids in documents:
            with self.open_session() as session:
                inputs = np.concatenate([prefix, ids[:-1]])
                scores.append(session.advance(inputs, ids, position=0, keep_from=0, shift=0))
        return scores


class ReferenceSession:
    """See `backends.base.LogitsSession`. The KV cache keeps each key as it was rotated, for its position."""

    def __init__(self, network: Qwen2ForCausalLM) -> None:
        self._network = network
        self.restart()

    def __enter__(self) -> ReferenceSession:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.restart()

    def restart(self) -> None:
        """Empty the KV cache."""
        self._cache = DynamicCache()
        self._positions = torch.empty(0, dtype=torch.long)

    def advance(self, ids: TokenIds, targets: TokenIds, *, position: int, keep_from: int, shift: int) -> FloatArray:
        """See `backends.base.Session`."""
        return self.advance_with_logits(ids, targets, position=position, keep_from=keep_from, shift=shift)[0]

    def advance_with_logits(
        self, ids: TokenIds, targets: TokenIds, *, position: int, keep_from: int, shift: int
    ) -> tuple[FloatArray, FloatArray]:
        """See `backends.base.LogitsSession`."""
        with torch.inference_mode():
            self._drop(keep_from)
            self._move_back(shift)
            positions = torch.arange(position, position + len(ids))
            hidden = self._network.model(
                input_ids=torch.from_numpy(ids.astype(np.int64))[None],
                attention_mask=_causal_mask(n_cached=len(self._positions), n_new=len(ids)),
                position_ids=positions[None],
                past_key_values=self._cache,
                use_cache=True,
            ).last_hidden_state
            self._positions = torch.cat([self._positions, positions])
            logits: FloatArray = self._network.lm_head(hidden[0, len(ids) - len(targets) :]).numpy()
        return reduce_logits(logits, targets, np.empty((_ROWS_AT_ONCE, logits.shape[1]), np.float32)), logits

    @property
    def _layers(self) -> Any:
        """The layers of the KV cache, with keys and values [1, heads, entries, head size]; none while it is empty."""
        return self._cache.layers

    def _drop(self, keep_from: int) -> None:
        """Drop the cache entries at positions [N_SINKS, keep_from)."""
        kept = (self._positions < N_SINKS) | (self._positions >= keep_from)
        for layer in self._layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        self._positions = self._positions[kept]

    def _move_back(self, shift: int) -> None:
        """Move the entries behind the sinks by `shift` positions: RoPE rotates their keys by an angle per position."""
        moved = self._positions >= N_SINKS
        for layer in self._layers:
            keys = layer.keys[:, :, moved]
            cos, sin = self._network.model.rotary_emb(keys, torch.tensor([[-shift]]))
            first_half, second_half = keys.chunk(2, dim=-1)
            layer.keys[:, :, moved] = keys * cos + torch.cat([-second_half, first_half], dim=-1) * sin
        self._positions = torch.where(moved, self._positions - shift, self._positions)


def _causal_mask(*, n_cached: int, n_new: int) -> torch.Tensor:
    """Return what is added to the attention scores, float32 [1, 1, n_new, n_cached + n_new].

    Every new token sees all of the cache, itself, and the new ones before it.
    """
    hidden = torch.full((n_new, n_cached + n_new), torch.finfo(torch.float32).min)
    return hidden.triu(diagonal=n_cached + 1)[None, None]


def _load(folder: Path) -> Qwen2ForCausalLM:
    network: Qwen2ForCausalLM
    shows_progress = is_progress_bar_enabled()
    disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    try:
        network, report = Qwen2ForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            local_files_only=True,
        )
    except Exception as error:  # transformers, safetensors and torch each have their own
        raise ModelFileError(f"{folder} cannot be loaded as a Qwen2 checkpoint: {error}") from error
    finally:
        if shows_progress:
            enable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    if missing := sorted(report["missing_keys"]):
        raise ModelFileError(f"{folder} lacks {len(missing)} weights, such as {missing[0]}: copy the checkpoint again.")
    return network
