"""A folder with small files of every kind that commands read, and ways to damage them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

from megapipe.convert import export
from megapipe.data.tokens import TokenWriter
from tests.parity.converted import write_checkpoint
from tests.parity.reference import init_random
from tests.unit.data.data_cases import train_bpe
from tests.unit.model.transformers_models import model_of

LONG = "n" * 300
"""A name that is too long for any file system."""
MODEL = model_of("llama_gqa").model_copy(update={"dtype": "fp32", "vocab_size": 257, "layers": 2})


def make_folder(folder: Path) -> None:
    """Write texts, rows, token files, tokenizers, a run, and its model as a Hugging Face folder."""
    folder.mkdir()
    (folder / "texts.txt").write_text("the cat sat on a mat and ran away " * 200)
    rows = [json.dumps({"text": f"row {i}", "n": i}) + "\n" for i in range(20)]
    (folder / "rows.jsonl").write_text("".join(rows))
    pq.write_table(pa.table({"body": ["a", "b"]}), folder / "rows.parquet")
    for name, top in (("t", 250), ("big", 69999)):
        with TokenWriter(folder / name, np.dtype("<u2" if top < 2**16 else "<i4")) as writer:
            for i in range(40):
                writer.add(np.full(50, top - i))
    for name, specials in (("bpe", ["</s>"]), ("endless", ["<unk>"])):
        (folder / name).mkdir()
        train_bpe(specials, 320).save(str(folder / name / "tokenizer.json"))
    (folder / "empty").mkdir()
    (folder / "empty.txt").write_bytes(b"")
    parameters = init_random(MODEL, seed=5, dtype=torch.float32)
    checkpoint = write_checkpoint(folder / "run", MODEL, parameters)
    export(checkpoint, folder / "hf", shard_bytes=50_000)


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def in_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / "hf/config.json", **changes)


def text(name: str, content: str | bytes) -> Callable[[Path], object]:
    """Write a file with this content."""
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def in_shard(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Change the tensors of the second shard."""

    def prepare(folder: Path) -> None:
        path = folder / "hf/model-00002-of-00002.safetensors"
        state = load_file(path)
        change(state)
        save_file(state, path)

    return prepare


def twice(folder: Path) -> None:
    """Add a tensor of the first shard to the second one."""
    first = load_file(folder / "hf/model-00001-of-00002.safetensors")
    in_shard(lambda state: state.update({"model.embed_tokens.weight": first.popitem()[1]}))(folder)


def with_manifest(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (path,) = (folder / "run").rglob("manifest.json")
        path.write_bytes(change(path.read_bytes()))

    return prepare


def cut_off(name: str, nbytes: int) -> Callable[[Path], None]:
    """Remove the last bytes of a file."""

    def prepare(folder: Path) -> None:
        (path,) = folder.glob(name)
        path.write_bytes(path.read_bytes()[:-nbytes])

    return prepare


def gone(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def swapped(folder: Path) -> None:
    """Pair the ids of one file with the index of another."""
    (folder / "big.idx").rename(folder / "t.idx")
