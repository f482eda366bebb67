"""Weights → the ONNX graph of the fast mode, built node by node: no exporter, no PyTorch.

The same function as the exported graph of `onnx.py`, in fewer and faster operators: attention with its KV cache and
rotary embedding is one node, so is each normalization with its residual, and the products run on 8-bit integers. What
keeps their errors small costs little or nothing while the model runs:

- **Rotation.** A few features of the hidden state are up to a hundred times the others, and one scale for a row of
  activations then wastes its steps on them. All matrices that read or write the hidden state are turned by one
  orthogonal matrix, which leaves the function as it is (an RMS norm does not change when its input is turned), and
  spreads those features evenly. The values of attention are turned within each head likewise.
  Source: QuaRot (arXiv 2404.00456), with a discrete cosine transform in place of a Hadamard matrix: there is one for
  every size.
- **A scale for each row of activations and each column of weights**, in groups of inputs where that helps (`RECIPE`).
- **16 bits for what the down projection reads**, as twice the rows of an 8-bit product: its inputs reach 305 where the
  usual largest is 2 to 18.
- **An exact first token.** All texts begin with the same prefix token, to whose keys every later token attends. Its
  cache entries and its prediction are computed here once, in float32, and stored.

What the graph takes and gives is described in `onnx.py`, but for the attention mask, which it does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto

from metachunk_edge.backends.ort import PREFIX_FILE
from metachunk_edge.convert.architecture import is_tied
from metachunk_edge.convert.scoring_graph import Graph
from metachunk_edge.errors import ConversionError
from metachunk_edge.types import FloatArray

__all__ = ["RECIPE", "recipe", "write_fused"]

Weights = Callable[[str], FloatArray]
"""A tensor in float32, by its name in the checkpoint."""

N_HEAD_SLICES = 32
"""The output matrix is cut into so many slices of the vocabulary; a slice's logits stay in the processor's cache."""

_EMBEDDING_TYPE = np.float16  # only the rows that are read come into memory
_SEED = 20241017  # of the rotation's signs: the same weights give the same file


@dataclass(frozen=True, slots=True)
class Quantization:
    """How one product is computed: as the sum of `n_groups` products over parts of its inputs, each with its scales."""

    n_groups: int
    activation_bits: int


RECIPE = {
    "qkv": Quantization(1, 8),
    "attention_output": Quantization(2, 8),
    "gate_up": Quantization(1, 8),
    "down": Quantization(2, 16),
    "head": Quantization(1, 8),
}
"""Chosen by measurement: see benchmarks/speed.md. `gate_up` must be one group: its scales are put off."""


def recipe() -> dict[str, Any]:
    """Return what a manifest says about the quantization."""
    products = {name: asdict(quantization) for name, quantization in RECIPE.items()}
    return {
        "weight_bits": 8,
        "rotation": "discrete cosine transform",
        "prefix": "float32",
        "products": products,
    }


def write_fused(config: Mapping[str, Any], weights: Weights, prefix_id: int, folder: Path) -> None:
    """Write `model.onnx`, `model_with_logits.onnx`, their weights, and the prefix token's results into `folder`.

    Args:
        config: the values of a Qwen2's `config.json`.
        weights: see `Weights`; each tensor is asked for once.
        prefix_id: the token that stands before every text.
        folder: must exist. Memory: the largest matrix in float32, three times.

    Raises:
        ConversionError: a size is odd, and its columns cannot be cut into two groups.
    """
    for key in ("hidden_size", "intermediate_size"):
        if config[key] % 2:
            raise ConversionError(f"{key} must be even for int8_fused, got {config[key]}: choose int8.")
    with (folder / "model.onnx.data").open("wb") as data:
        graph = Graph(data)
        model = _Model(config, weights, prefix_id, graph)
        logits = model.build()
    graph.save(folder / "model.onnx", config, logits=None)
    graph.save(folder / "model_with_logits.onnx", config, logits=logits)
    np.savez(folder / PREFIX_FILE, keys=model.prefix_keys, values=model.prefix_values, logits=model.prefix_logits)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Activations as the products take them: 8-bit integers, and what each row of them is multiplied by, [n, 1].

    With 16 bits, `integers` holds the rows twice: rounded, and 254 times what the rounding has lost.
    """

    integers: str
    scales: str
    has_16_bits: bool


class _Model:
    """Builds the layers from first to last, and takes the prefix token along in float32."""

    def __init__(self, config: Mapping[str, Any], weights: Weights, prefix_id: int, graph: Graph) -> None:
        self.graph = graph
        self._config = config
        self._weights = weights
        self._prefix_id = prefix_id
        self._size = config["hidden_size"]
        self._n_heads, self._n_key_value_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._head_size = self._size // self._n_heads
        self._rotation, self._head_rotation = rotation(self._size), rotation(self._head_size)
        shape = (config["num_hidden_layers"], self._n_key_value_heads, self._head_size)
        self.prefix_keys, self.prefix_values = np.empty(shape, np.float32), np.empty(shape, np.float32)

    def build(self) -> list[str]:
        """Add all nodes; return the names of the logits' slices."""
        self._add_constants()
        hidden = self._embedding()
        self._add_lengths()
        residual = None
        for layer in range(self._config["num_hidden_layers"]):
            normalized, residual = self._norm(hidden, residual)
            hidden = self._attention(layer, normalized)
            normalized, residual = self._norm(hidden, residual)
            hidden = self._feed_forward(layer, normalized)
        normalized, _ = self._norm(hidden, residual)
        return self._head(normalized)

    def _add_constants(self) -> None:
        constant = self.graph.constant
        self._axis_0, self._axis_1 = constant("axis_0", [0], np.int64), constant("axis_1", [1], np.int64)
        self._one = constant("one", 1, np.float32)
        self._zero_point = constant("zero_point", 128, np.uint8)
        frequencies = float(self._config["rope_theta"]) ** -(np.arange(0, self._head_size, 2) / self._head_size)
        angles = np.arange(self._config["max_position_embeddings"])[:, None] * frequencies
        constant("cosines", np.cos(angles), np.float32)
        constant("sines", np.sin(angles), np.float32)
        constant("ones", np.ones(self._size), np.float32)

    def _embedding(self) -> str:
        graph = self.graph
        table = self._weights("model.embed_tokens.weight")
        self._output_matrix = table if is_tied(self._config) else None
        turned = table @ self._rotation
        self._prefix = turned[self._prefix_id]
        ids = graph.node("Squeeze", ["input_ids", self._axis_0])
        rows = graph.node("Gather", [graph.constant("embedding", turned, _EMBEDDING_TYPE), ids])
        self._n_rows = graph.node("Shape", [ids])
        self._zero_points = graph.node("Expand", [graph.constant("zero_points", [128], np.uint8), self._n_rows])
        return str(graph.node("Cast", [rows], to=TensorProto.FLOAT))

    def _add_lengths(self) -> None:
        """What all layers' attention takes: the last position of the cache, and its length."""
        graph = self.graph
        n_past = graph.node("Shape", ["past_key_values.0.key"], start=2, end=3)
        length = graph.node("Cast", [graph.node("Add", [n_past, self._n_rows])], to=TensorProto.INT32)
        last = graph.node("Sub", [length, graph.constant("one_int32", [1], np.int32)])
        self._lengths = [last, graph.node("Squeeze", [length, self._axis_0])]

    def _norm(self, hidden: str, residual: str | None) -> tuple[str, str]:
        """Add `hidden` to the residual, and normalize; the weights of the norm are in the matrices behind it."""
        epsilon = self._config["rms_norm_eps"]
        if residual is None:
            kind = "SimplifiedLayerNormalization"
            return self.graph.node(kind, [hidden, "ones"], axis=-1, epsilon=epsilon), hidden
        kind = "SkipSimplifiedLayerNormalization"
        normalized, _, _, total = self.graph.fused(kind, [hidden, residual, "ones"], outputs=4, epsilon=epsilon)
        return normalized, total

    def _normalized_prefix(self) -> FloatArray:
        mean_square = np.mean(np.square(self._prefix)) + self._config["rms_norm_eps"]
        normalized: FloatArray = self._prefix / np.sqrt(mean_square)
        return normalized

    def _attention(self, layer: int, normalized: str) -> str:
        name = f"model.layers.{layer}"
        part, turn, size = f"{name}.self_attn", self._head_rotation, self._head_size
        value_bias = self._weights(f"{part}.v_proj.bias").reshape(-1, size) @ turn
        value_matrix = turn.T @ self._weights(f"{part}.v_proj.weight").reshape(-1, size, self._size)
        output_matrix = self._weights(f"{part}.o_proj.weight").reshape(self._size, -1, size) @ turn
        queries_and_keys = [self._weights(f"{part}.{letter}_proj.weight") for letter in "qk"]
        matrix = np.concatenate([*queries_and_keys, value_matrix.reshape(-1, self._size)])
        bias = np.concatenate(
            [*(self._weights(f"{part}.{letter}_proj.bias") for letter in "qk"), value_bias.reshape(-1)]
        )
        matrix = self._reading(matrix, f"{name}.input_layernorm.weight")
        output_matrix = self._writing(output_matrix.reshape(self._size, -1))

        prefix = (matrix @ self._normalized_prefix() + bias).reshape(-1, size)
        _, keys, values = np.split(prefix, [self._n_heads, self._n_heads + self._n_key_value_heads])
        self.prefix_keys[layer], self.prefix_values[layer] = keys, values  # not turned, at position 0
        attended = values.repeat(self._n_heads // self._n_key_value_heads, axis=0)  # it sees only itself
        self._prefix = self._prefix + output_matrix @ attended.reshape(-1)

        rows = self._rows(normalized, RECIPE["qkv"])
        qkv = self._product(f"qkv_{layer}", rows, matrix, bias)
        shared = [*self._lengths, "cosines", "sines", "position_ids"]
        past = [f"past_key_values.{layer}.{part}" for part in ("key", "value")]
        output, _, _ = self.graph.fused(
            "GroupQueryAttention",
            [self.graph.node("Unsqueeze", [qkv, self._axis_0]), "", "", *past, *shared],
            outputs=[f"attended_{layer}", f"present.{layer}.key", f"present.{layer}.value"],
            num_heads=self._n_heads,
            kv_num_heads=self._n_key_value_heads,
            do_rotary=1,
        )
        rows = self._rows(self.graph.node("Squeeze", [output, self._axis_0]), RECIPE["attention_output"])
        return self._product(f"attention_output_{layer}", rows, output_matrix)

    def _feed_forward(self, layer: int, normalized: str) -> str:
        graph, name = self.graph, f"model.layers.{layer}"
        norm = f"{name}.post_attention_layernorm.weight"
        gate, up = (self._reading(self._weights(f"{name}.mlp.{part}_proj.weight"), norm) for part in ("gate", "up"))
        down = self._writing(self._weights(f"{name}.mlp.down_proj.weight"))

        prefix = self._normalized_prefix()
        gated = gate @ prefix
        self._prefix = self._prefix + down @ (gated / (1 + np.exp(-gated)) * (up @ prefix))

        rows = self._rows(normalized, RECIPE["gate_up"])
        silu = graph.fused("QuickGelu", [self._product(f"gate_{layer}", rows, gate)], alpha=1.0)  # x · sigmoid(x)
        # The scale of a row of `up` can wait until behind the down projection, where rows are shorter.
        product = graph.node("Mul", [silu, self._unscaled(f"up_{layer}", rows[0], up)])
        down_rows = self._rows(product, RECIPE["down"])
        return self._product(f"down_{layer}", down_rows, down, scales=rows[0].scales)

    def _reading(self, matrix: FloatArray, norm: str) -> FloatArray:
        """A matrix [outputs, hidden size] that reads the normalized hidden state, with the norm's weights in it."""
        turned: FloatArray = np.matmul(matrix * self._weights(norm), self._rotation, dtype=np.float32)
        return turned

    def _writing(self, matrix: FloatArray) -> FloatArray:
        """A matrix [hidden size, inputs] that writes to the hidden state."""
        turned: FloatArray = np.matmul(self._rotation.T, matrix, dtype=np.float32)
        return turned

    def _product(
        self,
        name: str,
        rows: list[_Rows],
        matrix: FloatArray,
        bias: FloatArray | None = None,
        scales: str | None = None,
    ) -> str:
        """Add rows · matrixᵀ (· scales) (+ bias).

        Args:
            name: of the weights.
            rows: the activations, in groups of columns.
            matrix: float32 [outputs, inputs].
            bias: float32 [outputs].
            scales: the name of further factors, float32 [n, 1].
        """
        graph, n_groups = self.graph, len(rows)
        parts = zip(rows, np.split(matrix, n_groups, axis=1), strict=True)
        products = [
            graph.node("Mul", [self._unscaled(f"{name}.{number}", part, weights), part.scales])
            for number, (part, weights) in enumerate(parts)
        ]
        total = products[0] if n_groups == 1 else graph.node("Sum", products)
        if scales is not None:
            total = graph.node("Mul", [total, scales])
        return total if bias is None else str(graph.node("Add", [total, graph.constant(f"{name}.bias", bias)]))

    def _unscaled(self, name: str, rows: _Rows, matrix: FloatArray) -> str:
        """The product of one group, before each row is multiplied by its scale."""
        graph = self.graph
        columns, scales = quantized(matrix)
        product = self._integer_product(
            rows.integers, graph.constant(name, columns), graph.constant(f"{name}.scales", scales)
        )
        if not rows.has_16_bits:
            return product
        upper, lower = graph.node("Split", [product], outputs=2, axis=0, num_outputs=2)
        lower = graph.node("Mul", [lower, graph.constant("coarse", 1 / 254, np.float32)])
        return str(graph.node("Add", [upper, lower]))

    def _rows(self, rows: str, quantization: Quantization) -> list[_Rows]:
        """Quantize activations, each row of a group by its largest value."""
        graph, n_groups = self.graph, quantization.n_groups
        parts = [rows] if n_groups == 1 else graph.node("Split", [rows], outputs=n_groups, axis=1, num_outputs=n_groups)
        return [self._quantized_rows(part, has_16_bits=quantization.activation_bits == 16) for part in parts]

    def _quantized_rows(self, rows: str, *, has_16_bits: bool, zero_points: str | None = None) -> _Rows:
        graph = self.graph
        zero_points = zero_points or self._zero_points
        largest = graph.node("ReduceMax", [graph.node("Abs", [rows]), self._axis_1], keepdims=1)
        largest = graph.node("Max", [largest, graph.constant("tiny", 1e-20, np.float32)])
        scales = graph.node("Mul", [largest, graph.constant("per_step", 1 / 127, np.float32)])
        flat = graph.node("Squeeze", [scales, self._axis_1])
        integers = graph.node("QuantizeLinear", [rows, flat, zero_points], axis=0)
        if has_16_bits:
            rounded = graph.node("DequantizeLinear", [integers, flat, zero_points], axis=0)
            fine = graph.node("Mul", [flat, graph.constant("coarse", 1 / 254, np.float32)])
            lost = graph.node("QuantizeLinear", [graph.node("Sub", [rows, rounded]), fine, zero_points], axis=0)
            integers = graph.node("Concat", [integers, lost], axis=0)
        return _Rows(integers, scales, has_16_bits)

    def _integer_product(self, integers: str, columns: str, scales: str) -> str:
        inputs = [integers, columns, self._one, scales, self._zero_point]
        return str(self.graph.fused("MatMulIntegerToFloat", inputs))

    def _head(self, normalized: str) -> list[str]:
        """The log-probabilities of the targets: see `onnx.add_scoring_head`, whose way this is."""
        graph = self.graph
        norm = self._weights("model.norm.weight")
        matrix = self._weights("lm_head.weight") if self._output_matrix is None else self._output_matrix
        prefix = self._normalized_prefix()
        self.prefix_logits = np.empty(len(matrix), np.float32)
        n_targets = graph.node("Shape", ["targets"])
        first = graph.node("Sub", [self._n_rows, n_targets])
        scored = graph.node("Slice", [normalized, first, self._n_rows, self._axis_0])
        zero_points = graph.node("Expand", ["zero_points", n_targets])
        rows = self._quantized_rows(scored, has_16_bits=False, zero_points=zero_points)
        ids = graph.node("Unsqueeze", ["targets", self._axis_1])
        nothing = graph.constant("nothing", 0, np.float32)
        first_column = graph.constant("first_column", 0, np.int64)
        all_logits, normalizers, chosen = [], [], []
        begin = 0
        for number, part in enumerate(np.array_split(matrix, N_HEAD_SLICES)):
            turned: FloatArray = np.matmul(part * norm, self._rotation, dtype=np.float32)
            self.prefix_logits[begin : begin + len(part)] = turned @ prefix
            logits = graph.node("Mul", [self._unscaled(f"head.{number}", rows, turned), rows.scales])
            log_softmax = graph.node("LogSoftmax", [logits], axis=-1)
            element, its_log_softmax = (
                graph.node("Slice", [values, self._axis_0, self._axis_1, self._axis_1])
                for values in (logits, log_softmax)
            )
            normalizers.append(graph.node("Sub", [element, its_log_softmax]))
            column = graph.node("Sub", [ids, graph.constant(f"first_id_{number}", begin, np.int64)])
            last_column = graph.constant(f"last_column_{len(part)}", len(part) - 1, np.int64)
            nearest = graph.node("Clip", [column, first_column, last_column])
            value = graph.node("GatherElements", [logits, nearest], axis=1)
            chosen.append(graph.node("Where", [graph.node("Equal", [column, nearest]), value, nothing]))
            all_logits.append(logits)
            begin += len(part)
        together = graph.node("Concat", normalizers, axis=1)
        normalizer = graph.node("ReduceLogSumExp", [together, self._axis_1], keepdims=1)
        difference = graph.node("Sub", [graph.node("Sum", chosen), normalizer])
        graph.node("Squeeze", [difference, self._axis_1], outputs=["logprobs"])
        return all_logits


def rotation(size: int) -> FloatArray:
    """An orthogonal matrix, float32 [size, size], no entry of which is larger than sqrt(2 / size).

    It is a discrete cosine transform behind a random but fixed choice of signs.
    """
    frequencies, places = np.arange(size)[:, None], np.arange(size) + 0.5
    transform = np.sqrt(2 / size) * np.cos(np.pi / size * frequencies * places)
    transform[0] /= np.sqrt(2)
    signs = np.random.default_rng(_SEED).choice([-1.0, 1.0], size)
    turned: FloatArray = (signs[:, None] * transform.T).astype(np.float32)
    return turned


def quantized(matrix: FloatArray) -> tuple[Any, FloatArray]:
    """Return a matrix [outputs, inputs] as int8 [inputs, outputs], and the scale of each output, float32 [outputs]."""
    scales = np.abs(matrix).max(axis=1) / np.float32(127)
    scales[scales == 0] = 1
    return np.rint(matrix / scales[:, None]).astype(np.int8).T, scales
