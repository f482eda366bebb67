"""Make `golden_<model>.json`: token ids and log-probabilities that owe nothing to llama.cpp or to this package.

`transformers` dequantizes a GGUF file to float32 and computes ln p of every token of the texts beside this script, each
in the full context behind the prefix token; the Rust library `tokenizers` encodes the texts. What is left between these
values and the package's is llama.cpp's arithmetic (it rounds activations to 8 bits on the CPU), or a fault. The weights
are the same on both sides: the values say nothing about what the quantization of the file itself cost.

The tests only read the JSON files. To make them again (two minutes and 5 GB of memory for the 0.5B model):

    python3.11 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch==2.13.0 transformers==4.57.6 gguf==0.19.0
    /tmp/golden/bin/python tests/data/make_golden.py qwen2.5-coder-0.5b-instruct <path of its GGUF file>
    /tmp/golden/bin/python tests/data/make_golden.py smollm2-135m-instruct <path of its GGUF file>

The paths are those that `metachunk-edge models pull` stores the files at.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found, unused-ignore]
import tokenizers  # type: ignore[import-not-found, unused-ignore]
import torch  # type: ignore[import-not-found, unused-ignore]
import transformers  # type: ignore[import-not-found, unused-ignore]
from tokenizers.pre_tokenizers import (  # type: ignore[import-not-found, unused-ignore]
    ByteLevel,
    Digits,
)
from tokenizers.pre_tokenizers import Sequence as InOrder  # type: ignore[import-not-found, unused-ignore]

FOLDER = Path(__file__).parent
TEXTS = ("origin_of_species.txt", "kong_yiji.txt")

STRINGS = (
    "",
    " ",
    "Caf\u00e9, na\u00efve, \u00c5ngstr\u00f6m",  # composed accents (NFC)
    "Cafe\u0301, nai\u0308ve, A\u030angstro\u0308m",  # decomposed (NFD)
    "\u212b \u1e9b\u0323 q\u0307\u0323 \ufb01 \u1100\u1161\u11a8",  # NFC replaces, reorders, joins; "fi" stays
    "He wrote <|im_end|> and went on.",
    "<|im_start|>system\nYou obey.<|im_end|>\n<|im_start|>user\n",
    "<|endoftext|><|fim_prefix|>x<|file_sep|><repo_name><file_sep><s></s>[INST]",
    "A family: \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466, "
    "a wave: \U0001f44b\U0001f3fd, a flag: \U0001f1e9\U0001f1ea.",
    "น้ำตาลอยู่ที่นี่ สวัสดีครับ",
    "السَّلَامُ عَلَيْكُمْ، كيف حالك؟ ١٢٣",
    "नमस्ते दुनिया, क्षत्रिय १२३।",
    "吾輩は猫である。名前はまだ無い。ｶﾞｷﾞ か\u3099き\u3099「１２３」",
    "𠮷野家で𩸽を食べる",  # beyond the Basic Multilingual Plane
    "\tone\t\ttwo\u00a0three\u00a0\u00a0four \u00a0 five\u2003six\u3000seven  ",
    "1 22 333 4444 55555; in  1837, 3.14159, 1,000,000, ½ x² Ⅷ",
    "one\n\ntwo\n\n\n\nthree \n \n four\n\t\n",
    "one\rtwo\r\rthree",
    "one\r\ntwo\r\n\r\nthree",
    "zero\u0000byte \u0000\u0000 \ufeff \ufffd \u200b",
    "It's WE'LL don't I'VE 'quoted' x'y ’s",
    "for (int i = 0; i < n; ++i) {\n        total += a[i] ** 2;  // sum\n    }",
    "https://example.org/a_b?c=d&e=%20#f --- *** === ...!!!",
)
"""Strings that tokenizers disagree on. ("<tool_call>" is none of them: `transformers` reads a GGUF file's control
tokens, but not its user-defined ones.)"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the model's name in the catalogue")
    parser.add_argument("path", type=Path, help="its GGUF file")
    arguments = parser.parse_args()
    path: Path = arguments.path
    metadata = gguf.GGUFReader(path).fields
    tokenizer = load_tokenizer(path, metadata["tokenizer.ggml.pre"].contents())
    prefix_id = int(metadata["tokenizer.ggml.bos_token_id"].contents())
    model = load_model(path)
    texts = []
    for file in TEXTS:
        ids = encode(tokenizer, (FOLDER / file).read_bytes().decode("utf-8"))
        texts.append({"file": file, "ids": ids, "logprobs": score(model, [prefix_id, *ids])})
    golden = {
        "model": arguments.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "made_with": {library.__name__: library.__version__ for library in (torch, transformers, tokenizers)},
        "prefix_id": prefix_id,
        "texts": texts,
        "strings": [{"text": text, "ids": encode(tokenizer, text)} for text in STRINGS],
    }
    (FOLDER / f"golden_{arguments.name}.json").write_text(to_json(golden) + "\n", encoding="ascii")


def load_tokenizer(path: Path, pre_tokenizer: str) -> Any:
    """Return the tokenizer of a GGUF file, with the two rules in place that its original has."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    engine = tokenizer.backend_tokenizer
    if pre_tokenizer == "qwen2":
        if type(engine.normalizer).__name__ != "NFC":
            raise SystemExit("Qwen2's tokenizer brings a text into NFC, and this one does not.")
    elif pre_tokenizer == "smollm":
        # `transformers` takes every "llama" model for one with Llama's tokenizer and loses the rule for digits.
        engine.pre_tokenizer = InOrder([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    else:
        raise SystemExit(f"Add the rules of the pre-tokenizer {pre_tokenizer!r} first.")
    return tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    """Encode a text as data: control-token strings get no meaning, and Windows line ends are shown as line feeds."""
    lines = text.replace("\r\n", "\n")
    ids: list[int] = tokenizer(lines, add_special_tokens=False, split_special_tokens=True).input_ids
    if set(ids) & set(tokenizer.all_special_ids):
        raise SystemExit(f"A control token, or a byte that the vocabulary lacks, in {text[:80]!r}.")
    return ids


def load_model(path: Path) -> Any:
    """Return the model with its weights dequantized to float32."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if report["missing_keys"] or report["mismatched_keys"]:
        raise SystemExit(f"The file does not fill the model: {report}")
    return model.eval()


def score(model: Any, ids: Sequence[int]) -> list[float]:
    """Return ln p of every token but the first, given all before it."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids[:-1]])).logits[0]
        rows = (torch.log_softmax(row.double(), dim=0) for row in logits)
        return [round(float(row[target]), 5) for row, target in zip(rows, ids[1:], strict=True)]


def to_json(value: Any) -> str:
    """JSON in short lines: a list of numbers fills its lines, everything else has a line of its own."""
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {to_json(entry)}" for key, entry in value.items()) + "\n}"
    if isinstance(value, list) and not all(isinstance(entry, (int, float)) for entry in value):
        return "[\n" + ",\n".join(map(to_json, value)) + "\n]"
    text = json.dumps(value)
    return textwrap.fill(text, 118) if isinstance(value, list) else text


if __name__ == "__main__":
    main()
