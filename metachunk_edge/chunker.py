"""One document, from text to chunks: read this first.

    text ──► sentences and tokens ──► BACKEND ──► scored sentences ──► boundaries ──► chunks
             sentences.py, tokens.py  windows.py  scoring.py           boundaries.py  merge.py

Every stage is a generator that pulls from the one before it, so a stream of any length passes through in constant
memory and the first chunk comes out after a few blocks. `Chunker` binds a loaded model to settings; `cut` is the
part behind the model, for scores that are already there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, tee
from pathlib import Path

import numpy as np

from metachunk_edge.backends import load_backend
from metachunk_edge.backends.base import Backend
from metachunk_edge.boundaries import find_boundaries
from metachunk_edge.catalogue import DEFAULT_MODEL
from metachunk_edge.merge import merge_sentences
from metachunk_edge.scoring import ScoredSentence, score_documents, scored_sentences
from metachunk_edge.settings import Settings
from metachunk_edge.types import Alignment, Chunk, Encoding, Sentence, SentenceScores, TokenScores, Trace, WindowPlan
from metachunk_edge.windows import plan_blocks

__all__ = ["Chunker", "cut"]
