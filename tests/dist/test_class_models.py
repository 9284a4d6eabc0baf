"""Classes of transformers compute in every layout what the untouched class does in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megapipe import train
from megapipe.checkpoint.find import find_checkpoint
from megapipe.config.config import Config
from megapipe.convert import export
from megapipe.errors import ConfigError
from megapipe.generate.cached_decoder import CachedDecoder
from megapipe.inference import Model, load_model
from megapipe.layout.resolve import resolve
from megapipe.model.hf import experts
from tests.parity.cases import Case
from tests.parity.class_models import (
    FAMILIES,
    ClassCase,
    check_class,
    make_class,
    run_classes,
    settle,
)
from tests.parity.tiers import in_parts
from tests.parity.user_models import check_in_worlds

IN_FP32 = {"deepseek_v3", "gemma3_text", "qwen3_next"}
"""Families whose classes compute routers, norms or recurrences in fp32, whatever their type."""
UNSPLIT = {"phi3", "gpt_oss"}
"""Families without a plan that splits layers over tp."""
UNATTENDED = {"gpt_oss", "qwen3_next"}
"""Families with layers that have attention sinks or are recurrent."""
WINDOWS = {"gemma3_text"}
"""Families whose layers see windows that are shorter than the samples."""
PIPELINES = [
    Case(pp=2, m=3, masked=0.3, steps=3),
    Case(pp=2, dp=2, schedule="zb_v", m=4, zero=3, steps=3),
    Case(pp=2, chunks=2, schedule="interleaved_1f1b", m=4, steps=3),
    Case(pp=4, schedule="zb_h1", m=4, steps=3),
    Case(pp=2, m=3, activations="full", steps=3),
]
SLICES = [
    Case(pp=2, schedule="seq1f1b", slices=2, m=3, masked=0.3, sequence=16, steps=3),
    Case(
        pp=2,
        cp=2,
        schedule="seq1f1b",
        slices=2,
        m=2,
        documents=True,
        activations="full",
        sequence=16,
        steps=3,
    ),
]
DOCUMENTS = [
    Case(pp=2, m=3, masked=0.3, documents=True, steps=3),
    Case(pp=2, dp=2, schedule="zb_v", m=4, zero=3, documents=True, activations="full", steps=3),
]
CONTEXT = [
    Case(cp=2, m=2, masked=0.3, steps=3),
    Case(cp=2, context="ulysses", m=2, steps=3),
    Case(cp=2, pp=2, schedule="zb_h1", m=3, documents=True, activations="full", steps=3),
]
EXPERTS = [
    Case(dp=2, ep=2, moe="top 2", m=2, masked=0.3, steps=3),
    Case(
        pp=2,
        dp=2,
        ep=2,
        moe="top 2",
        schedule="zb_v",
        m=4,
        zero=3,
        activations="full",
        steps=3,
    ),
    Case(cp=2, ep=2, moe="top 2", dispatch="all_gather", m=2, steps=3),
]
ADAPTERS = [
    Case(pp=2, dp=2, schedule="zb_v", m=4, zero=3, activations="full", steps=3),
    Case(tp=2, pp=2, schedule="zb_h1", m=3, steps=3),
    Case(cp=2, m=2, steps=3),
]
SPLIT = [
    Case(tp=2, m=2, masked=0.3, steps=3),
    Case(tp=2, pp=2, m=3, schedule="zb_h1", steps=3),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which each family's folder is made when it is needed."""
    return tmp_path_factory.mktemp("classes")


def folder_of(folders: Path, family: str) -> Path:
    path = folders / family
    if not path.exists():
        make_class(family).save_pretrained(path)
    return path


def check(folder: Path, cases: Sequence[Case], *, adapts: bool = False) -> None:
    """Train a class in all layouts."""
    in_double = folder.name in IN_FP32
    every = [ClassCase(folder, case, in_double, adapts=adapts) for case in cases]
    check_in_worlds(every, run_classes, check_class)


@in_parts("family", FAMILIES, default=["smollm3"], full=["gpt_oss", "deepseek_v3"])
def test_pipelines(family: str, folders: Path) -> None:
    check(folder_of(folders, family), PIPELINES)


def without(*lacking: set[str]) -> list[str]:
    return [each for each in FAMILIES if each not in set().union(*lacking)]


@in_parts("family", without(UNATTENDED), default=["smollm3"], full=["gemma3_text"])
def test_documents(family: str, folders: Path) -> None:
    check(folder_of(folders, family), DOCUMENTS)


def test_positions_restart_in_every_stage(folders: Path) -> None:
    """Ministral scales queries by their positions, in every layer."""
    case = Case(pp=4, m=3, documents=True, steps=2)
    one = ClassCase(folder_of(folders, "ministral3"), case, restarts=True)
    check_in_worlds([one], run_classes, check_class)


@in_parts("family", without(UNATTENDED, WINDOWS), default=["qwen3"], full=["mixtral"])
def test_slices(family: str, folders: Path) -> None:
    check(folder_of(folders, family), SLICES)


@in_parts("family", without(UNATTENDED, WINDOWS), default=["smollm3"], full=["deepseek_v3"])
def test_context_parallel(family: str, folders: Path) -> None:
    check(folder_of(folders, family), CONTEXT)


@in_parts("family", ["mixtral", "deepseek_v3"], default=["mixtral"])
def test_expert_parallel(family: str, folders: Path) -> None:
    folder = folder_of(folders, family)
    for case in EXPERTS:
        model = settle(ClassCase(folder, case))[1].model
        assert any(spec.over_ep for spec in model.parameters(model.whole))
    check(folder, EXPERTS)


@in_parts("family", ["qwen3", "mixtral", "glm"], default=["qwen3"], full=["mixtral"])
def test_adapters(family: str, folders: Path) -> None:
    check(folder_of(folders, family), ADAPTERS, adapts=True)


@in_parts("family", without(UNSPLIT), default=["qwen3"], full=["mixtral"])
def test_tensor_parallel(family: str, folders: Path) -> None:
    check(folder_of(folders, family), SPLIT)


@pytest.mark.parametrize(
    ("family", "rank"),
    [
        ("gemma3_text", None),
        ("smollm3", 2),
        pytest.param("mixtral", None, marks=pytest.mark.full),
        pytest.param("mixtral", 2, marks=pytest.mark.full),
    ],
)
def test_a_run_goes_on_in_another_layout_and_is_exported(
    family: str, rank: int | None, folders: Path, tmp_path: Path
) -> None:
    """The export has the bits of the checkpoint, or adapters merged; it is what an uninterrupted
    run has learned, and computes what the checkpoint computes."""
    keys = {
        "model.source": f"hf:{folder_of(folders, family)}",
        "model.dtype": "fp64",
        "run.folder": str(tmp_path),
        "pipeline.transport": "in_process",
        "train.steps": 3,
        "train.sequence_length": 8,
        "train.global_batch": 4,
        "train.microbatch": 1,
        "train.validation_samples": 4,
        "lora.rank": rank,
    }
    math = {"kernels.only.attention": "auto" if family == "gemma3_text" else "math"}
    whole = train({**keys, **math, "run.name": "whole", "parallel.pp": 2})
    train({**keys, "run.name": "parts", "parallel.pp": 4, "train.stop_after": 2})
    zb_v = {"parallel.pp": 2, "pipeline.schedule": "zb_v"}
    parts = train({**keys, **zb_v, "run.name": "parts"})
    models = []
    for run in (whole, parts):
        checkpoint = find_checkpoint(run, verify=False)
        export(checkpoint, tmp_path / f"of_{run.name}", shard_bytes=40_000)
        model, about = AutoModelForCausalLM.from_pretrained(
            tmp_path / f"of_{run.name}",
            dtype=torch.float64,
            output_loading_info=True,
            experts_implementation=experts.NAME,
        )
        assert not any(about.values()), about
        named = dict(model.named_parameters())
        bits = [p.equal(checkpoint.read(f"model/{name}")) for name, p in named.items()]
        assert all(bits) == (rank is None)
        models.append(named)
    for name, parameter in models[0].items():
        assert torch.allclose(parameter, models[1][name], rtol=1e-9, atol=1e-12), name
    check_generation(load_model(find_checkpoint(parts), torch.device("cpu")), model)


def check_generation(model: Model, wanted: Any) -> None:
    """Check the logits of texts that grow, with keys and values kept, against whole forwards."""
    assert model.keeps
    texts = [[7, 8, 9, 10], [11], [12, 13]]
    reading = CachedDecoder(model, texts, room=3)
    for token in (20, 21, 22):
        logits = reading.logits()
        assert logits is not None
        for text, own in zip(texts, logits, strict=True):
            whole = wanted(input_ids=torch.tensor([text])).logits[0, -1]
            assert torch.allclose(own[: len(whole)], whole, rtol=1e-9, atol=1e-12)
            text.append(token)
        reading.append([token] * len(texts))


@pytest.mark.parametrize(
    ("family", "case", "reason"),
    [
        *((family, SPLIT[0], r"parallel\.tp=2") for family in sorted(UNSPLIT)),
        ("gpt_oss", CONTEXT[0], "its attention has sinks"),
        ("gpt_oss", DOCUMENTS[0], "its attention has sinks"),
        ("qwen3_next", CONTEXT[0], "layer 0 passes values between positions in another way"),
        ("qwen3_next", DOCUMENTS[0], "layer 0 passes values between positions in another way"),
        ("gemma3_text", CONTEXT[0], "layer 0 sees a window of 6 positions"),
        ("llama", EXPERTS[0], r"parallel\.ep=2: LlamaForCausalLM has no experts"),
        ("mixtral", replace(EXPERTS[0], dispatch="fetch"), r"experts\.dispatch=fetch: the experts"),
    ],
)
def test_what_a_class_lacks_is_refused(family: str, case: Case, reason: str, folders: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        settle(ClassCase(folder_of(folders, family), case))


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"dp": 3, "ep": 3}, r"8 experts are not divisible by parallel\.ep=3: ep could be 1, 2, 4"),
        ({"dp": 2, "ep": 2, "tp": 2}, r"expected parallel\.tp=1"),
        ({"dp": 2, "ep": 4}, r"parallel\.ep=4 does not divide dp 2"),
        ({"dp": 6, "ep": 2}, r"shard_group_size=2 does not divide the 3 expert-data-parallel"),
    ],
)
def test_ranks_that_do_not_fit_the_experts_are_refused(
    sizes: dict[str, int], reason: str, folders: Path
) -> None:
    config = Config.model_validate(
        {
            "model": {"source": f"hf:{folder_of(folders, 'mixtral')}", "dtype": "fp64"},
            "parallel": sizes,
            "optimizer": {"shard_group_size": 2 if sizes["dp"] == 6 else None},
            "train": {"global_batch": 6, "sequence_length": 8, "microbatch": 1},
        }
    )
    with pytest.raises(ConfigError, match=reason):
        resolve(config, sizes["dp"] * sizes.get("tp", 1), None)
