"""Whatever key one rank has otherwise than the others: all end before they train, and say which.

The other values are made from the types of the keys (``tests/parity/other_values.py``). For every
key the ranks are threads that compare in a real store what ranks compare; for one of each section
they are processes that were started so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from megapipe.config.keys import KEYS, OPTIONS_OF, SECTIONS
from megapipe.data.tokenizer import load_tokenizer
from megapipe.errors import LaunchError
from megapipe.launch.launch_info import LaunchInfo
from megapipe.launch.rendezvous import compare_ranks
from megapipe.observe import package_hash
from megapipe.train.job import compared
from tests.parity.jobs import arguments, tiny
from tests.parity.launches import run_forked
from tests.parity.other_values import (
    ALONE,
    GIVEN,
    OPTIONS,
    WORLD,
    flat,
    other,
    outcome,
    resolved,
)
from tests.parity.threads import at_once
from tests.parity.tiers import in_parts

STARTED = (
    *(
        "run.seed",
        "model.init_std",
        "model.rope.base",
        "model.moe.expert_ffn_hidden",
        "lora.alpha",
        "parallel.sequence_parallel",
    ),
    *("context.position_split", "experts.dispatch", "pipeline.debug"),
    *("activations.policy", "data.document_mask", "optimizer.lr", "kernels.tp_comm_overlap"),
    *(
        "kernels.only.norm",
        "train.validate_every",
        "health.spike_factor",
        "checkpoint.keep",
        "log.every",
    ),
    "plan.peak_tflops",
    "plan.factors.gemm",
)
"""One key of each section."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def test_a_key_of_each_section_is_started_and_few_have_no_other_value() -> None:
    assert [key.rpartition(".")[0] for key in STARTED] == list(SECTIONS)
    assert set(STARTED) | set(ALONE) <= set(KEYS)
    assert len(ALONE) <= 2
    assert all(ALONE.values())


def test_a_run_has_its_ranks_compare_every_key() -> None:
    """And the size of the tokenizer, the files of the package, and the version of torch."""
    config = resolved(list(GIVEN))
    values = compared(config, tokenizer := load_tokenizer(config.data.tokenizer))
    assert values.keys() == {*KEYS, "the tokenizer's size", "megapipe's files", "torch"}
    assert values["the tokenizer's size"] == tokenizer.vocab_size
    assert values["megapipe's files"] == package_hash()
    assert outcome(list(GIVEN)).items() <= values.items()


@in_parts("section", SECTIONS, default=["parallel"], full=6)
def test_ranks_see_every_difference(section: str, port: int) -> None:
    for key in keys_of(section):
        common, different = other(key)
        values = [outcome(given) for given in (common, [*common, *different])]

        def compare(rank: int, key: str = key, values: list[dict[str, Any]] = values) -> None:
            store = PrefixStore(key, TCPStore("127.0.0.1", port))
            info = LaunchInfo(rank, WORLD, rank, WORLD, port=port, hosted=True)
            compare_ranks(store, info, values[rank], 10)

        first, second = at_once(WORLD, compare)
        assert isinstance(first, LaunchError), key
        assert str(first) == str(second)
        assert str(first).startswith("the ranks disagree: ")
        before, now = (repr(of_rank[flat(key)]) for of_rank in values)
        assert f"{flat(key)} is {before} on rank 0 but {now} on rank 1" in str(first)


def keys_of(section: str) -> list[str]:
    """Return the keys of a section whose values may be changed, with options one by one."""
    keys = [key for key in KEYS if key.rpartition(".")[0] == section and key not in ALONE]
    own = [each for each in OPTIONS if flat(each) in keys]
    return [*(key for key in keys if key not in OPTIONS_OF), *own]


@in_parts("key", STARTED, full=3)
def test_processes_that_differ_end_before_they_train(key: str, tmp_path: Path) -> None:
    common, different = other(key)
    given = [*arguments(tiny(tmp_path)), *(one for one in common if "source" not in one)]
    ended = run_forked(tmp_path, WORLD, *given, last=different)
    ended.assert_one_line(4, "the ranks disagree: ", " on rank 0 but ", " on rank 1")
    assert re.search(rf"\b{re.escape(key)} is ", ended.errors[0])
    assert ended.text.count("\n") == 1
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "cache").exists()
