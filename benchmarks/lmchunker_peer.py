"""One document through lmchunker, in an environment of its own: `python lmchunker_peer.py CHECKPOINT SENTENCES.json`.

Its sentence splitter needs data that it downloads; it gets our sentences instead. Prints seconds, without those for
loading the model, and peak memory, as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch
from lmchunker import chunker
from transformers import AutoModelForCausalLM, AutoTokenizer

checkpoint, sentences_path = sys.argv[1:]
sentences = json.loads(Path(sentences_path).read_text(encoding="utf-8"))
torch.set_num_threads(2)
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
started = time.perf_counter()
with (
    patch("lmchunker.modules.ppl_chunking.split_text_by_punctuation", lambda *_: sentences),
    contextlib.redirect_stdout(io.StringIO()),
):
    chunks = chunker("".join(sentences), model, tokenizer, "en")
seconds = time.perf_counter() - started
peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
print(json.dumps({"seconds": seconds, "peak_mb": peak_mb, "n_chunks": len(chunks)}))
