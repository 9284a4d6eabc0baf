"""Reads exports with the transformers that is first on the path: ``python read_by_older.py
FOLDER``.

Prints JSON: the version, and for each folder in FOLDER the largest difference of its logits from
the expected ones, what loading reports, and the ids of a text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "Größe: 5 €, isn't it?\n  x = 1"


def read(folder: Path) -> dict[str, Any]:
    """Load one of the folders and return what is printed of it."""
    tokens, expected = torch.load(folder / "expected.pt")
    # the default attention of Gemma 2 ignores its score caps
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    with torch.no_grad():
        apart = (model(tokens).logits - expected).abs().max().item()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {
        "apart": apart,
        "dtype": str(model.dtype),
        "loading": {key: sorted(map(str, names)) for key, names in loading.items() if names},
        "ids": tokenizer(TEXT).input_ids,
        "end": tokenizer.eos_token_id,
    }


def main() -> None:
    torch.set_num_threads(1)
    folders = sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir())
    found = {path.name: read(path) for path in folders}
    print(json.dumps({"version": transformers.__version__, "folders": found}))


if __name__ == "__main__":
    main()
