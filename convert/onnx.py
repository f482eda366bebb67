"""Checkpoint → ONNX: optimum's export, a scoring head in place of the bare logits, and onnxruntime's quantizers.

What the graph takes and gives, for one document (batch 1), n tokens of a block and p entries of the KV cache:

    input_ids, position_ids   int64 [1, n]            attention_mask   int64 [1, p + n], all ones
    past_key_values.L.key, .value   float32 [1, key-value heads, p, head size]
    targets                   int64 [m], m <= n: what follows the last m tokens
    logprobs                  float32 [m]: ln p(target)
    logits                    float32 [m, vocabulary], in model_with_logits.onnx only
    present.L.key, .value     float32 [1, key-value heads, p + n, head size]

The second graph is for the parity suite and shares the weights of the first: ONNX Runtime computes every output of a
graph, whether it is asked for or not.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from optimum.exporters.onnx import main_export
from transformers.utils import logging as transformers_logging

from metachunk_edge.errors import ConversionError

if TYPE_CHECKING:
    from metachunk_edge.convert.checkpoint import Checkpoint

__all__ = ["add_scoring_head", "write_onnx"]

QUANTIZED_BITS = {"int8": 8, "int4": 4}

HALF_PRECISION_LIMIT = 65_504.0

N_HEAD_SLICES = 8
"""The output matrix is cut into so many slices, one after the other: only one slice's logits are held at a time."""

BLOCK_LENGTH = 32
"""Weights that share a scale. Activations are quantized in the same blocks, row by row, while the model runs: a
single scale for all of them, as plain dynamic quantization has it, loses several times as much accuracy."""

_EIGHT_BIT_ACTIVATIONS = 4  # MatMulNBits' attribute accuracy_level
_HEAD = "/scoring_head/"


def write_onnx(checkpoint: Checkpoint, folder: Path, precision: str) -> None:
    """Write `model.onnx`, `model_with_logits.onnx` and their weights into `folder`, which must be empty.

    Raises:
        ConversionError: the exporter gave a graph of another form than expected.
    """
    path = folder / "model.onnx"
    with _quiet():
        try:
            _export(checkpoint.folder, folder)
        except Exception as error:  # of PyTorch, transformers or optimum
            raise ConversionError(f"The ONNX exporter failed: {error}") from error
        model = onnx.load(path, load_external_data=False)
        model = onnx.shape_inference.infer_shapes(model)  # without the weights, for it takes no more than 2 GB
        onnx.load_external_data_for_model(model, str(folder))
        for file in folder.iterdir():  # the exporter's own copies of config and tokenizer, too
            file.unlink()
        model = _with_scoring_head(model, precision)
    onnx.save_model(
        model,
        folder / "model_with_logits.onnx",
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=1_024,
    )
    graph = model.graph
    graph.node.remove(_maker_of("logits", graph))
    graph.output.remove(next(output for output in graph.output if output.name == "logits"))
    onnx.save_model(model, path)


def _with_scoring_head(model: Any, precision: str) -> Any:
    if precision == "float16":
        model = _in_half_precision(model)  # before the head, which reduces the logits in single precision
    add_scoring_head(model)
    return _quantized(model, QUANTIZED_BITS[precision]) if precision in QUANTIZED_BITS else model


def _export(checkpoint_folder: Path, folder: Path) -> None:
    main_export(
        str(checkpoint_folder),
        folder,
        task="text-generation-with-past",
        dtype="fp32",
        local_files_only=True,
        do_validation=False,  # verify.py compares the finished file with the reference
        no_post_process=True,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The tracer warns of every branch in the model's code, and the quantizer reports each node it leaves alone.

    Errors come as exceptions.
    """
    logging.getLogger("onnxruntime.quantization.matmul_nbits_quantizer").setLevel(logging.CRITICAL)
    verbosity, shows_progress = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shows_progress:
            transformers_logging.enable_progress_bar()


def add_scoring_head(model: Any) -> None:
    """Replace the graph's logits by the log-probabilities of the targets, in place.

    The rows of the targets are taken before the output matrix, which is cut into slices of the vocabulary. A slice's
    log-normalizer is x - LogSoftmax(x), read off one element; the whole one is the log-sum-exp over the slices.

    Args:
        model: an onnx.ModelProto whose output `logits` is the product of a hidden state and a constant matrix.

    Raises:
        ConversionError: the last product is not of that form.
    """
    from onnx import TensorProto, helper, numpy_helper, parser

    graph = model.graph
    product = _maker_of("logits", graph)
    if product is not None and product.op_type == "Cast":  # of half-precision logits
        graph.node.remove(product)
        product = _maker_of(product.input[0], graph)
    weights = {tensor.name: tensor for tensor in graph.initializer}
    if product is None or product.op_type != "MatMul" or product.input[1] not in weights:
        raise ConversionError("The exporter gave a graph that does not end in an output matrix: install optimum 2.1.")
    matrix = weights[product.input[1]]
    slices = np.array_split(numpy_helper.to_array(matrix), N_HEAD_SLICES, axis=1)
    graph.node.remove(product)
    graph.initializer.remove(matrix)

    head = parser.parse_graph(_head_text([part.shape[1] for part in slices]))
    for number, node in enumerate(head.node):
        node.name = f"{_HEAD}{number}"
        node.input[:] = [product.input[0] if name == "hidden" else name for name in node.input]
    graph.node.extend(head.node)
    graph.initializer.extend(head.initializer)
    for number, part in enumerate(slices):
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(part), f"head_weight_{number}"))

    cache = [output for output in graph.output if output.name != "logits"]
    del graph.output[:]
    graph.input.append(helper.make_tensor_value_info("targets", TensorProto.INT64, ["n_targets"]))
    graph.output.append(helper.make_tensor_value_info("logprobs", TensorProto.FLOAT, ["n_targets"]))
    graph.output.append(helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n_targets", matrix.dims[1]]))
    graph.output.extend(cache)


def _maker_of(value: str, graph: Any) -> Any:
    return next((node for node in graph.node if value in node.output), None)


def _head_text(widths: list[int]) -> str:
    """The head in ONNX's text form, but for the weights; `widths` are those of the slices."""
    first_ids = np.cumsum([0, *widths[:-1]])
    numbers = range(len(widths))
    slices = "".join(map(_slice_text, numbers, first_ids, widths))
    logits, normalizers, chosen = (
        ", ".join(f"head_{name}_{number}" for number in numbers) for name in ("logits", "normalizer", "chosen")
    )
    return f"""
        scoring_head (int64[m] targets, float[1, n, width] hidden) => (float[m] logprobs, float[m, vocabulary] logits)
        <int64[1] head_0 = {{0}}, int64[1] head_1 = {{1}}, int64[1] head_2 = {{2}}, float head_nothing = {{0}}>
        {{
            head_n_targets = Shape(targets)
            head_shape = Shape(hidden)
            head_n = Slice(head_shape, head_1, head_2)
            head_first = Sub(head_n, head_n_targets)
            head_scored = Slice(hidden, head_first, head_n, head_1)
            head_rows = Squeeze(head_scored, head_0)
            {slices}
            head_normalizers = Concat<axis = 1>({normalizers})
            head_normalizer = ReduceLogSumExp<keepdims = 1>(head_normalizers, head_1)
            head_chosen = Sum({chosen})
            head_difference = Sub(head_chosen, head_normalizer)
            logprobs = Squeeze(head_difference, head_1)
            logits = Concat<axis = 1>({logits})
        }}"""


def _slice_text(number: int, first_id: int, width: int) -> str:
    """One slice: its logits, its log-normalizer, and the logits of those targets that lie in it, 0 for the others."""
    text = f"""
            head_first_id = Constant<value = int64 {{{first_id}}}>()
            head_last_column = Constant<value = int64 {{{width - 1}}}>()
            head_first_column = Constant<value = int64 {{0}}>()
            head_column = Sub(targets, head_first_id)
            head_nearest = Clip(head_column, head_first_column, head_last_column)
            head_equal = Equal(head_column, head_nearest)
            head_is_inside = Unsqueeze(head_equal, head_1)
            head_index = Unsqueeze(head_nearest, head_1)
            head_product = MatMul(head_rows, head_weight)
            head_logits = Cast<to = 1>(head_product)
            head_log_softmax = LogSoftmax<axis = -1>(head_logits)
            head_an_element = Slice(head_logits, head_0, head_1, head_1)
            head_its_log_softmax = Slice(head_log_softmax, head_0, head_1, head_1)
            head_normalizer = Sub(head_an_element, head_its_log_softmax)
            head_value = GatherElements<axis = 1>(head_logits, head_index)
            head_chosen = Where(head_is_inside, head_value, head_nothing)
    """
    shared = r"head_(?!rows|0|1|nothing)\w+"
    return re.sub(shared, lambda name: f"{name[0]}_{number}", text)


def _in_half_precision(model: Any) -> Any:
    """Weights and activations, but for the normalizations, whose squares overflow, and the rotary angles."""
    from onnx import TensorProto
    from onnx.numpy_helper import to_array
    from onnxruntime.transformers.float16 import convert_float_to_float16

    for tensor in model.graph.initializer:
        if (
            tensor.data_type == TensorProto.FLOAT
            and not np.abs(to_array(tensor)).max(initial=0) <= HALF_PRECISION_LIMIT
        ):
            raise ConversionError(f"The weights {tensor.name} do not fit in float16: choose float32.")
    kept = [node.name for node in model.graph.node if "norm/" in node.name or "rotary_emb/" in node.name]
    model = convert_float_to_float16(
        model,
        keep_io_types=True,
        disable_shape_infer=True,
        node_block_list=kept,
        max_finite_val=HALF_PRECISION_LIMIT,
    )
    _join_kept_nodes(model.graph)
    return model


def _join_kept_nodes(graph: Any) -> None:
    """Hand values from one kept node to the next as they are.

    The converter rounds them to half precision in between, where the squares of a normalization become infinite, and
    its results 0: finite, and wrong.
    """
    from onnx import TensorProto

    casts = {node.output[0]: node for node in graph.node if node.op_type == "Cast"}
    joined = {}
    for output, cast in casts.items():
        before = casts.get(cast.input[0])
        if before is not None and _target_of(before) == TensorProto.FLOAT16 and _target_of(cast) == TensorProto.FLOAT:
            joined[output] = before.input[0]
    for node in graph.node:
        node.input[:] = [joined.get(name, name) for name in node.input]
    read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    unread = [cast for output, cast in casts.items() if output not in read]
    for cast in unread:
        graph.node.remove(cast)


def _target_of(cast: Any) -> int:
    return next(int(attribute.i) for attribute in cast.attribute if attribute.name == "to")


def _quantized(model: Any, bits: int) -> Any:
    """Weights in blocks of BLOCK_LENGTH; the embeddings, which the quantizer leaves whole, in half precision."""
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

    config = DefaultWeightOnlyQuantConfig(block_size=BLOCK_LENGTH, bits=bits, accuracy_level=_EIGHT_BIT_ACTIVATIONS)
    quantizer = MatMulNBitsQuantizer(model, algo_config=config)
    quantizer.process()
    _halve_embeddings(quantizer.model.model)
    return quantizer.model.model


def _halve_embeddings(model: Any) -> None:
    from onnx import TensorProto, helper, numpy_helper

    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    position, gather = next(
        (position, node)
        for position, node in enumerate(graph.node)
        if node.op_type == "Gather" and node.input[1] == "input_ids" and node.input[0] in weights
    )
    embeddings = weights[gather.input[0]]
    embeddings.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(embeddings).astype(np.float16), embeddings.name))
    whole = gather.output[0]
    gather.output[0] = f"{whole}_half"
    graph.node.insert(position + 1, helper.make_node("Cast", [gather.output[0]], [whole], to=TensorProto.FLOAT))
