"""The evaluation texts of the shared folder as plain documents, and lengths of text for speed measurements."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
EXAMPLE = REPOSITORY / "tests" / "data" / "origin_of_species.txt"


@dataclass(frozen=True, slots=True)
class Text:
    folder: str
    name: str
    text: str


def evaluation_texts(folder: Path = SHARED_DATA) -> dict[str, list[Text]]:
    """Return the documents of every folder, in a fixed order."""
    readers = {
        "chroma": _chroma,
        "qmsum": _qmsum,
        "vcsum": _vcsum,
        "xquad": _xquad,
        "minilongbench": _minilongbench,
    }
    return {name: [Text(name, *item) for item in reader(folder / name)] for name, reader in readers.items()}


def interleaved(texts: dict[str, list[Text]]) -> Iterator[Text]:
    """Yield the first document of every folder, then every second one, and so on."""
    queues = {name: iter(documents) for name, documents in texts.items()}
    for name in cycle(list(queues)):
        if not queues:
            return
        if name in queues:
            text = next(queues[name], None)
            if text is None:
                del queues[name]
            else:
                yield text


def long_text(n_characters: int) -> str:
    """Return English prose of a given length: the shared finance reports where they are there, else the example."""
    source = SHARED_DATA / "chroma" / "finance.md"
    text = (source if source.exists() else EXAMPLE).read_text(encoding="utf-8")
    return (text * (n_characters // len(text) + 1))[:n_characters]


def _chroma(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*.md")):
        yield path.name, path.read_text(encoding="utf-8")


def _qmsum(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*.json")):
        turns = json.loads(path.read_text(encoding="utf-8"))["meeting_transcripts"]
        yield path.name, "\n".join(f"{turn['speaker']}: {turn['content']}" for turn in turns)


def _vcsum(folder: Path) -> Iterator[tuple[str, str]]:
    for line in (folder / "short_test.txt").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        yield record["id"], "\n".join("".join(turn) for turn in record["context"])


def _xquad(folder: Path) -> Iterator[tuple[str, str]]:
    articles = [
        (f"{path.name}: {article['title']}", "\n\n".join(paragraph["context"] for paragraph in article["paragraphs"]))
        for path in sorted(folder.glob("*.json"))
        for article in json.loads(path.read_text(encoding="utf-8"))["data"]
    ]
    for start in range(48):  # the three languages in turn
        yield from articles[start::48]


def _minilongbench(folder: Path) -> Iterator[tuple[str, str]]:
    items = []
    for path in sorted(folder.glob("*.json")):
        records = json.loads(path.read_text(encoding="utf-8"))
        items.append([(f"{path.name}: {key}", record["origin_prompt"]) for key, record in records.items()])
    for place in range(max(map(len, items))):
        yield from (item[place] for item in items if place < len(item))
