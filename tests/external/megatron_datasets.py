"""Data sets of megatron-core: what imports this is skipped where it is not installed."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig


def dataset_config(seed: int, sequence_length: int, **given: Any) -> GPTDatasetConfig:
    given = {"blend": (["x"], None), "split": "1,1,1", **given}
    tokenizer = SimpleNamespace(vocab_size=65536, pad=-1, eod=0, eos=0, unique_identifiers={})
    return GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **given,
    )


def training_rows(prefix: Path, seed: int, sequence_length: int, split: str, n: int) -> Tensor:
    """Return the first `n` samples that GPTDataset trains on: tokens and the last label [n, s +
    1]."""
    config = dataset_config(seed, sequence_length, blend=([str(prefix)], None), split=split)
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [n, None, None], lambda: True, config)
    samples = [builder.build()[0][i] for i in range(n)]
    rows = [np.append(sample["tokens"], sample["labels"][-1]) for sample in samples]
    return torch.from_numpy(np.stack(rows)).long()
