"""An ONNX graph that grows node by node, with its large weights in a file beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["Graph"]

_MICROSOFT = "com.microsoft"
_INLINE_BYTES = 1_024
_ALIGNMENT = 1 << 16  # what Windows maps files in


class Graph:
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
            self._constants[name] = self._stored(name, np.asarray(values, dtype, order="C"))
        return name

    def _stored(self, name: str, array: Any) -> Any:
        if array.nbytes < _INLINE_BYTES:
            return numpy_helper.from_array(array, name)
        self._data.write(bytes(-self._data.tell() % _ALIGNMENT))
        tensor = TensorProto(
            name=name,
            data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
            dims=array.shape,
            data_location=TensorProto.EXTERNAL,
        )
        place = {"location": Path(self._data.name).name, "offset": self._data.tell(), "length": array.nbytes}
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
        tokens: dict[str, list[str | int | None]] = {
            "input_ids": [1, "n"],
            "position_ids": [1, "n"],
            "targets": ["n_targets"],
        }
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
