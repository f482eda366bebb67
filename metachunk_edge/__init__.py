"""Cut documents for retrieval where a small language model says so: Meta-Chunking, offline, on your own machine.

>>> from metachunk_edge import Chunker, Settings
>>> chunker = Chunker.from_pretrained("qwen2.5-coder-0.5b-instruct", Settings(max_size=300))  # doctest: +SKIP
>>> for chunk in chunker.chunk(text):  # doctest: +SKIP
...     assert text[chunk.start : chunk.end] == chunk.text

Read `chunker.py` first: it names the stages in order.
"""

from metachunk_edge.backends import Device
from metachunk_edge.backends.base import Backend, Session, Tokenizer
from metachunk_edge.backends.fake import FakeBackend
from metachunk_edge.cache import ModelFile, cache_folder
from metachunk_edge.catalogue import (
    DEFAULT_MODEL,
    CatalogueEntry,
    catalogue,
    find_model,
    remove,
    verify,
)
from metachunk_edge.chunker import Chunker, cut
from metachunk_edge.convert import convert_model
from metachunk_edge.download import pull
from metachunk_edge.errors import (
    BackendError,
    ConversionError,
    DeviceError,
    DeviceWarning,
    DocumentError,
    DownloadError,
    MetachunkError,
    MissingExtraError,
    ModelError,
    ModelFileError,
    ModelNotFoundError,
    ParityError,
    ScoresError,
    SettingsError,
)
from metachunk_edge.scores import read_scores, write_scores
from metachunk_edge.scoring import ScoredSentence, ScoredTokens
from metachunk_edge.settings import Settings
from metachunk_edge.types import (
    Alignment,
    Block,
    Chunk,
    Encoding,
    Sentence,
    SentenceScores,
    TokenScores,
    Trace,
    WindowPlan,
)

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_MODEL",
    "Alignment",
    "Backend",
    "BackendError",
    "Block",
    "CatalogueEntry",
    "Chunk",
    "Chunker",
    "ConversionError",
    "Device",
    "DeviceError",
    "DeviceWarning",
    "DocumentError",
    "DownloadError",
    "Encoding",
    "FakeBackend",
    "MetachunkError",
    "MissingExtraError",
    "ModelError",
    "ModelFile",
    "ModelFileError",
    "ModelNotFoundError",
    "ParityError",
    "ScoredSentence",
    "ScoredTokens",
    "ScoresError",
    "Sentence",
    "SentenceScores",
    "Session",
    "Settings",
    "SettingsError",
    "TokenScores",
    "Tokenizer",
    "Trace",
    "WindowPlan",
    "__version__",
    "cache_folder",
    "catalogue",
    "convert_model",
    "cut",
    "find_model",
    "pull",
    "read_scores",
    "remove",
    "verify",
    "write_scores",
]
