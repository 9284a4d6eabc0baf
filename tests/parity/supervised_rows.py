"""Rows of examples, settings that read them, and the resulting tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from megapipe.config.data import DataConfig
from megapipe.data.supervised import Examples, prepare_examples
from megapipe.data.tokenizer import ByteTokenizer
from tests.parity.chats import conversation


def settings(
    folder: Path, rows: list[Any], template: str | None = None, **given: Any
) -> DataConfig:
    lines = [json.dumps(row) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    if template is not None:
        (folder / "chat.jinja").write_text(template)
        given["chat_template"] = str(folder / "chat.jinja")
    usual = {"source": str(folder / "rows.jsonl"), "cache": str(folder / "cache")}
    usual |= {"sample_format": "supervised", "validation_fraction": 0}
    return DataConfig(**{**usual, **given})


def stored(examples: Examples, vocab_size: int) -> list[tuple[list[int], list[bool]]]:
    """Return the ids of each example, and which of them are labels."""
    part = examples.part("train")
    assert part is not None
    tokens = part.file.tokens[:].astype(int)
    each = np.split(tokens, np.cumsum(part.file.lengths[:])[:-1])
    return [((t % vocab_size).tolist(), (t < vocab_size).tolist()) for t in each]


def chat(*texts: str) -> dict[str, Any]:
    return {"messages": conversation(*texts)}


def rows_of_all_sizes() -> list[Any]:
    return [chat(f"question {i} " * (i % 5), f"answer {i}") for i in range(40)]


def in_other_files(config: DataConfig, folder: Path, *names: str) -> None:
    """Check that files of other forms give the same examples as those of `config`."""
    right = stored(prepare_examples(config, ByteTokenizer(), progress=False), 257)
    assert len(right) == 40
    for name in names:
        places = {"source": str(folder / name), "cache": str(folder / f"cache of {name}")}
        other = config.model_copy(update=places)
        assert stored(prepare_examples(other, ByteTokenizer(), progress=False), 257) == right, name
