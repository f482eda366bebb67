"""Makes metachunk_edge/backends/products.onnx: `python tests/data/make_products.py FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def products_model() -> bytes:
    weights = numpy_helper.from_array(np.full((64, 16), 127, np.int8), "weights")
    rows = helper.make_tensor_value_info("rows", TensorProto.UINT8, [8, 64])
    products = helper.make_tensor_value_info("products", TensorProto.INT32, [8, 16])
    node = helper.make_node("MatMulInteger", ["rows", "weights"], ["products"])
    graph = helper.make_graph([node], "products", [rows], [products], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(products_model())
