"""Weights → the ONNX graph of the fast mode, built node by node: no exporter, no PyTorch.

The same function as the exported graph of `onnx.py`, in fewer and faster operators: attention with its KV cache and
rotary embedding is one node, so is each normalization with its residual, and the products run on 8-bit integers. What
keeps their errors small costs nothing while the model runs:

- **Rotation.** A few features of the hidden state are up to a hundred times the others, and one scale for a row of
  activations then wastes its steps on them. All matrices that read or write the hidden state are turned by one
  orthogonal matrix, which leaves the function as it is (an RMS norm does not change when its input is turned), and
  spreads those features evenly. The values of attention are turned within each head likewise.
  Source: QuaRot (arXiv 2404.00456), with a discrete cosine transform in place of a Hadamard matrix: there is one for
  every size.
- **A scale for each row of activations and each column of weights**, in groups of inputs where that helps (`RECIPE`).
- **16 bits for what the down projection reads**, as two 8-bit products over the same weights: its inputs reach 305
  where the usual largest is 2 to 18.
- **An exact first token.** All texts begin with the same prefix token, whose keys every later token attends to.
  Its cache entries and its prediction are computed here once, in float32, and stored.

What the graph takes and gives is described in `onnx.py`, but for the attention mask, which it does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from metachunk_edge.backends.ort import PREFIX_FILE
from metachunk_edge.convert.architecture import is_tied
from metachunk_edge.types import FloatArray

__all__ = ["RECIPE", "recipe", "write_fused"]

Weights = Callable[[str], FloatArray]
"""A tensor in float32, by its name in the checkpoint."""

N_HEAD_SLICES = 32
"""The output matrix is cut into so many slices of the vocabulary; a slice's logits stay in the processor's cache."""

_EMBEDDING_TYPE = np.float16  # only the rows that are read come into memory
_MICROSOFT = "com.microsoft"
_SEED = 20241017  # of the rotation's signs: the same weights give the same file
_INLINE_BYTES = 1_024
_ALIGNMENT = 1 << 16  # what Windows maps files in


@dataclass(frozen=True, slots=True)
class Quantization:
    """How one product is computed: as the sum of `n_groups` products over parts of its inputs, each with its scales."""

    n_groups: int
    activation_bits: int


RECIPE = {
    "qkv": Quantization(1, 8),
    "attention_output": Quantization(4, 8),
    "gate_up": Quantization(2, 8),
    "down": Quantization(4, 16),
    "head": Quantization(1, 8),
}
"""Chosen by measurement: see benchmarks/README.md."""


def recipe() -> dict[str, Any]:
    """Return what a manifest says about the quantization."""
    products = {name: asdict(quantization) for name, quantization in RECIPE.items()}
    return {"weight_bits": 8, "rotation": "discrete cosine transform", "prefix": "float32", "products": products}


def write_fused(config: Mapping[str, Any], weights: Weights, prefix_id: int, folder: Path) -> None:
    """Write `model.onnx`, `model_with_logits.onnx`, their weights, and the prefix token's results into `folder`.

    Args:
        config: the values of a Qwen2's `config.json`.
        weights: see `Weights`; each tensor is asked for once.
        prefix_id: the token that stands before every text.
        folder: must exist and be empty. Memory: the largest matrix in float32, three times.
    """
    with (folder / "model.onnx.data").open("wb") as data:
        model = _Model(config, weights, prefix_id, _Graph(data))
        logits = model.build()
    model.graph.save(folder / "model.onnx", config, logits=None)
    model.graph.save(folder / "model_with_logits.onnx", config, logits=logits)
    np.savez(folder / PREFIX_FILE, keys=model.prefix_keys, values=model.prefix_values, logits=model.prefix_logits)


class _Graph:
    """Nodes and weights as they gather. Large weights go straight to the file `data`."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._nodes: list[Any] = []
        self._constants: dict[str, Any] = {}

    def node(self, kind: str, inputs: list[str], *, domain: str = "", outputs: Any = 1, **attributes: Any) -> Any:
        """Add a node; `outputs` are names, or their number. Return the name of its output, or all of them."""
        number = len(self._nodes)
        names = [f"{kind}_{number}_{index}" for index in range(outputs)] if isinstance(outputs, int) else outputs
        self._nodes.append(helper.make_node(kind, inputs, names, f"{kind}_{number}", domain=domain, **attributes))
        return names[0] if len(names) == 1 else names

    def fused(self, kind: str, inputs: list[str], **attributes: Any) -> Any:
        """Add a node of ONNX Runtime's own operators."""
        return self.node(kind, inputs, domain=_MICROSOFT, **attributes)

    def constant(self, name: str, values: Any, dtype: Any = None) -> str:
        """Add a weight, or find the one of that name."""
        if name not in self._constants:
            array = np.ascontiguousarray(np.asarray(values, dtype))
            self._constants[name] = self._stored(name, array)
        return name

    def _stored(self, name: str, array: Any) -> Any:
        if array.nbytes < _INLINE_BYTES:
            return numpy_helper.from_array(array.reshape(np.shape(array)), name)
        self._data.write(bytes(-self._data.tell() % _ALIGNMENT))
        tensor = TensorProto(
            name=name,
            data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
            dims=array.shape,
            data_location=TensorProto.EXTERNAL,
        )
        place = {"location": "model.onnx.data", "offset": self._data.tell(), "length": array.nbytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self._data.write(array.data)
        return tensor

    def save(self, path: Path, config: Mapping[str, Any], *, logits: list[str] | None) -> None:
        """Write the graph; with `logits`, the names of their slices, it gives them too."""
        nodes = list(self._nodes)
        scores = [helper.make_tensor_value_info("logprobs", TensorProto.FLOAT, ["n_targets"])]
        if logits is not None:
            nodes.append(helper.make_node("Concat", logits, ["logits"], "all_logits", axis=1))
            shape = ["n_targets", config["vocab_size"]]
            scores.append(helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape))
        tokens = {"input_ids": [1, "n"], "position_ids": [1, "n"], "targets": ["n_targets"]}
        inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name, shape in tokens.items()]
        past, present = _cache_values(config, "past_key_values", "p"), _cache_values(config, "present", "p_and_n")
        graph = helper.make_graph(nodes, "scoring", inputs + past, scores + present, list(self._constants.values()))
        versions = [helper.make_opsetid("", 21), helper.make_opsetid(_MICROSOFT, 1)]
        onnx.save_model(helper.make_model(graph, opset_imports=versions, ir_version=10), path)


def _cache_values(config: Mapping[str, Any], name: str, length: str) -> list[Any]:
    heads, head_size = config["num_key_value_heads"], config["hidden_size"] // config["num_attention_heads"]
    return [
        helper.make_tensor_value_info(f"{name}.{layer}.{part}", TensorProto.FLOAT, [1, heads, length, head_size])
        for layer in range(config["num_hidden_layers"])
        for part in ("key", "value")
    ]


class _Model:
    """Builds the layers from first to last, and takes the prefix token along in float32."""

    def __init__(self, config: Mapping[str, Any], weights: Weights, prefix_id: int, graph: _Graph) -> None:
        self.graph = graph
        self._config = config
        self._weights = weights
        self._prefix_id = prefix_id
        self._hidden_size = config["hidden_size"]
        self._n_heads, self._n_key_value_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._key_and_value_heads = [self._n_heads, self._n_heads + self._n_key_value_heads]
        self._head_size = self._hidden_size // self._n_heads
        self._rotation = rotation(self._hidden_size)
        self._head_rotation = rotation(self._head_size)
        n_layers = config["num_hidden_layers"]
        self.prefix_keys = np.empty((n_layers, self._n_key_value_heads, self._head_size), np.float32)
        self.prefix_values = np.empty_like(self.prefix_keys)

    def build(self) -> list[str]:
        """Add all nodes; return the names of the logits' slices."""
        graph = self.graph
        self._axis_0 = graph.constant("axis_0", [0], np.int64)
        self._axis_1 = graph.constant("axis_1", [1], np.int64)
        hidden = self._embedding()
        self._shared_inputs()
        residual = None
        for layer in range(self._config["num_hidden_layers"]):
            normalized, residual = self._norm(hidden, residual)
            hidden = self._attention(layer, normalized)
            normalized, residual = self._norm(hidden, residual)
            hidden = self._feed_forward(layer, normalized)
        normalized, _ = self._norm(hidden, residual)
        return self._head(normalized)

    def _embedding(self) -> str:
        graph = self.graph
        table = self._weights("model.embed_tokens.weight")
        self._output_matrix = table if is_tied(self._config) else None
        turned = table @ self._rotation
        self._prefix = turned[self._prefix_id]
        ids = graph.node("Squeeze", ["input_ids", self._axis_0])
        rows = graph.node("Gather", [graph.constant("embedding", turned, _EMBEDDING_TYPE), ids])
        self._n_rows = graph.node("Shape", [ids])
        return str(graph.node("Cast", [rows], to=TensorProto.FLOAT))

    def _shared_inputs(self) -> None:
        """What all layers' attention takes: lengths, and the angles of the rotary embedding."""
        graph = self.graph
        n_past = graph.node("Shape", ["past_key_values.0.key"], start=2, end=3)
        length = graph.node("Cast", [graph.node("Add", [n_past, self._n_rows])], to=TensorProto.INT32)
        last = graph.node("Sub", [length, graph.constant("one_int32", [1], np.int32)])
        self._lengths = [last, graph.node("Squeeze", [length, self._axis_0])]
        frequencies = float(self._config["rope_theta"]) ** -(np.arange(0, self._head_size, 2) / self._head_size)
        angles = np.arange(self._config["max_position_embeddings"])[:, None] * frequencies
        graph.constant("cosines", np.cos(angles), np.float32)
        graph.constant("sines", np.sin(angles), np.float32)
        self._zero_point = graph.constant("zero_point", 128, np.uint8)
        self._zero_points = graph.constant("zero_points", [128], np.uint8)
        self._one = graph.constant("one", 1, np.float32)

    def _norm(self, hidden: str, residual: str | None) -> tuple[str, str]:
        """Add `hidden` to the residual, and normalize; the weights of the norm are in the matrices behind it."""
        ones = self.graph.constant("ones", np.ones(self._hidden_size), np.float32)
        epsilon = self._config["rms_norm_eps"]
        if residual is None:
            kind = "SimplifiedLayerNormalization"
            return self.graph.node(kind, [hidden, ones], axis=-1, epsilon=epsilon), hidden
        kind = "SkipSimplifiedLayerNormalization"
        normalized, _, _, total = self.graph.fused(kind, [hidden, residual, ones], outputs=4, epsilon=epsilon)
        return normalized, total

    def _prefix_norm(self) -> FloatArray:
        mean_square = np.mean(np.square(self._prefix, dtype=np.float64)) + self._config["rms_norm_eps"]
        return (self._prefix / np.sqrt(mean_square)).astype(np.float32)

    def _attention(self, layer: int, normalized: str) -> str:
        graph, name = self.graph, f"model.layers.{layer}"
        part = f"{name}.self_attn"
        turn, n_groups = self._head_rotation, self._n_heads // self._n_key_value_heads
        value_bias = self._weights(f"{part}.v_proj.bias").reshape(-1, self._head_size) @ turn
        value_matrix = self._weights(f"{part}.v_proj.weight").reshape(-1, self._head_size, self._hidden_size)
        value_matrix = (turn.T @ value_matrix).reshape(-1, self._hidden_size)
        output_matrix = self._weights(f"{part}.o_proj.weight").reshape(self._hidden_size, -1, self._head_size) @ turn
        matrices = [*(self._weights(f"{part}.{letter}_proj.weight") for letter in "qk"), value_matrix]
        biases = [*(self._weights(f"{part}.{letter}_proj.bias") for letter in "qk"), value_bias.reshape(-1)]
        matrix = self._reading(np.concatenate(matrices), f"{name}.input_layernorm.weight")
        bias = np.concatenate(biases)
        output_matrix = self._writing(output_matrix.reshape(self._hidden_size, -1))

        prefix = matrix @ self._prefix_norm() + bias
        _, keys, values = np.split(prefix.reshape(-1, self._head_size), self._key_and_value_heads)
        self.prefix_keys[layer], self.prefix_values[layer] = keys, values
        self._prefix = self._prefix + output_matrix @ values.repeat(n_groups, axis=0).reshape(-1)  # it sees only itself

        qkv = self._product(f"qkv_{layer}", normalized, matrix, RECIPE["qkv"], bias=bias)
        attended, _, _ = graph.fused(
            "GroupQueryAttention",
            [
                graph.node("Unsqueeze", [qkv, self._axis_0]),
                "",
                "",
                f"past_key_values.{layer}.key",
                f"past_key_values.{layer}.value",
                *self._lengths,
                "cosines",
                "sines",
                "position_ids",
            ],
            outputs=[f"attended_{layer}", f"present.{layer}.key", f"present.{layer}.value"],
            num_heads=self._n_heads,
            kv_num_heads=self._n_key_value_heads,
            do_rotary=1,
        )
        rows = graph.node("Squeeze", [attended, self._axis_0])
        return self._product(f"attention_output_{layer}", rows, output_matrix, RECIPE["attention_output"])

    def _feed_forward(self, layer: int, normalized: str) -> str:
        graph, name = self.graph, f"model.layers.{layer}"
        gate, up = (self._weights(f"{name}.mlp.{part}_proj.weight") for part in ("gate", "up"))
        matrix = self._reading(np.concatenate([gate, up]), f"{name}.post_attention_layernorm.weight")
        down = self._writing(self._weights(f"{name}.mlp.down_proj.weight"))

        prefix_gate, prefix_up = np.split(matrix @ self._prefix_norm(), 2)
        self._prefix = self._prefix + down @ (prefix_gate / (1 + np.exp(-prefix_gate)) * prefix_up)

        both = self._product(f"gate_up_{layer}", normalized, matrix, RECIPE["gate_up"])
        gate, up = graph.node("Split", [both], outputs=2, axis=1, num_outputs=2)
        rows = graph.node("Mul", [graph.fused("QuickGelu", [gate], alpha=1.0), up])  # x · sigmoid(x) is SiLU
        return self._product(f"down_{layer}", rows, down, RECIPE["down"])

    def _reading(self, matrix: FloatArray, norm: str) -> FloatArray:
        """A matrix [outputs, hidden size] that reads the normalized hidden state, with the norm's weights in it."""
        return (matrix * self._weights(norm)) @ self._rotation

    def _writing(self, matrix: FloatArray) -> FloatArray:
        """A matrix [hidden size, inputs] that writes to the hidden state."""
        return self._rotation.T @ matrix

    def _product(
        self, name: str, rows: str, matrix: FloatArray, quantization: Quantization, bias: FloatArray | None = None
    ) -> str:
        """Add rows · matrixᵀ (+ bias) in 8-bit integers; `matrix` is [outputs, inputs]."""
        graph = self.graph
        n_inputs = matrix.shape[1]
        n_groups = quantization.n_groups if n_inputs % quantization.n_groups == 0 else 1
        parts = [rows] if n_groups == 1 else graph.node("Split", [rows], outputs=n_groups, axis=1, num_outputs=n_groups)
        products = []
        for number, (part, weights) in enumerate(zip(parts, np.split(matrix, n_groups, axis=1), strict=True)):
            columns, scales = _quantized(weights)
            stored = [graph.constant(f"{name}.{number}", columns), graph.constant(f"{name}.{number}.scales", scales)]
            multiply = self._in_16_bits if quantization.activation_bits == 16 else self._in_8_bits
            products.append(multiply(part, *stored))
        total = products[0] if n_groups == 1 else graph.node("Sum", products)
        return total if bias is None else str(graph.node("Add", [total, graph.constant(f"{name}.bias", bias)]))

    def _in_8_bits(self, rows: str, columns: str, scales: str) -> str:
        graph = self.graph
        row_scales = self._row_scales(rows)
        product = self._integer_product(self._integers(rows, row_scales), columns, scales)
        return str(graph.node("Mul", [product, row_scales]))

    def _in_16_bits(self, rows: str, columns: str, scales: str) -> str:
        """The rounded values, and below them, as so many more rows of the same product, 254 times what was lost."""
        graph = self.graph
        row_scales = self._row_scales(rows)
        scaled = graph.node("Div", [rows, row_scales])
        upper = graph.node("Round", [scaled])
        lower = graph.node("Mul", [graph.node("Sub", [scaled, upper]), graph.constant("fine", 254, np.float32)])
        both = graph.node("Concat", [upper, lower], axis=0)
        integers = graph.node("QuantizeLinear", [both, self._one, self._zero_point])
        product = self._integer_product(integers, columns, scales)
        upper, lower = graph.node("Split", [product], outputs=2, axis=0, num_outputs=2)
        lower = graph.node("Mul", [lower, graph.constant("coarse", 1 / 254, np.float32)])
        return str(graph.node("Mul", [graph.node("Add", [upper, lower]), row_scales]))

    def _row_scales(self, rows: str) -> str:
        """What the largest value of each row is divided by to be 127, float32 [n, 1]."""
        graph = self.graph
        largest = graph.node("ReduceMax", [graph.node("Abs", [rows]), self._axis_1], keepdims=1)
        largest = graph.node("Max", [largest, graph.constant("tiny", 1e-20, np.float32)])
        return str(graph.node("Mul", [largest, graph.constant("per_step", 1 / 127, np.float32)]))

    def _integers(self, rows: str, row_scales: str) -> str:
        graph = self.graph
        flat = graph.node("Squeeze", [row_scales, self._axis_1])
        zero_points = graph.node("Expand", [self._zero_points, graph.node("Shape", [flat])])
        return str(graph.node("QuantizeLinear", [rows, flat, zero_points], axis=0))

    def _integer_product(self, integers: str, columns: str, scales: str) -> str:
        inputs = [integers, columns, self._one, scales, self._zero_point]
        return str(self.graph.fused("MatMulIntegerToFloat", inputs))

    def _head(self, normalized: str) -> list[str]:
        """The log-probabilities of the targets: see `onnx.add_scoring_head`, whose way this is."""
        graph = self.graph
        norm = self._weights("model.norm.weight")
        matrix = self._weights("lm_head.weight") if self._output_matrix is None else self._output_matrix
        prefix = self._prefix_norm()
        self.prefix_logits = np.empty(len(matrix), np.float32)
        first = graph.node("Sub", [self._n_rows, graph.node("Shape", ["targets"])])
        rows = graph.node("Slice", [normalized, first, self._n_rows, self._axis_0])
        row_scales = self._row_scales(rows)
        integers = self._integers(rows, row_scales)
        ids = graph.node("Unsqueeze", ["targets", self._axis_1])
        nothing = graph.constant("nothing", 0, np.float32)
        first_column = graph.constant("first_column", 0, np.int64)
        all_logits, normalizers, chosen = [], [], []
        begin = 0
        for number, part in enumerate(np.array_split(matrix, N_HEAD_SLICES)):
            turned = (part * norm) @ self._rotation
            self.prefix_logits[begin : begin + len(part)] = turned @ prefix
            columns, scales = _quantized(turned)
            stored = [graph.constant(f"head.{number}", columns), graph.constant(f"head.{number}.scales", scales)]
            logits = graph.node("Mul", [self._integer_product(integers, *stored), row_scales])
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

    >>> turn = rotation(6)
    >>> np.allclose(turn @ turn.T, np.eye(6), atol=1e-6)
    True
    """
    frequencies, places = np.arange(size)[:, None], np.arange(size) + 0.5
    transform = np.sqrt(2 / size) * np.cos(np.pi / size * frequencies * places)
    transform[0] /= np.sqrt(2)
    signs = np.random.default_rng(_SEED).choice([-1.0, 1.0], size)
    turned: FloatArray = (signs[:, None] * transform.T).astype(np.float32)
    return turned


def _quantized(matrix: FloatArray) -> tuple[Any, FloatArray]:
    """Return int8 [inputs, outputs] and the scale of each output, float32 [outputs], of a matrix [outputs, inputs]."""
    scales = np.abs(matrix).max(axis=1) / np.float32(127)
    scales[scales == 0] = 1
    return np.rint(matrix / scales[:, None]).astype(np.int8).T, scales.astype(np.float32)
