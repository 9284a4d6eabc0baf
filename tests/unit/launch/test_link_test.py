"""Keys of the section `plan` from measured links."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from megapipe.cli import parse
from megapipe.config.plan_file import plan_words, write_plan_file
from megapipe.errors import ConfigError, LaunchError
from megapipe.launch.link_test import Link, measure_links, plan_keys


def links(slow: tuple[int, int] = (0, 0)) -> list[Link]:
    """Return the links of two nodes of two processes: 100 and 10 GB/s, but one of 2."""
    return [
        Link(a, b, 2e-5, 2.0 if (a, b) == slow else 100.0 if a // 2 == b // 2 else 10.0)
        for a, b in combinations(range(4), 2)
    ]


def test_medians_within_nodes_and_between_them() -> None:
    usual = {"intra_node_gb_s": 100.0, "inter_node_gb_s": 10.0, "link_latency_us": 20.0}
    assert plan_keys(links(), 2) == usual
    assert plan_keys(links(slow=(1, 2)), 2) == {**usual, "links": {"1-2": 2.0}}
    assert plan_keys(links()[:1], 2) == {"intra_node_gb_s": 100.0, "link_latency_us": 20.0}


def test_a_plan_reads_what_is_written(tmp_path: Path) -> None:
    file = tmp_path / "links.yaml"
    write_plan_file(file, "measured", plan_keys(links(slow=(1, 2)), 2))
    plan = parse(plan_words(file)).config.plan
    assert (plan.links, plan.inter_node_gb_s) == ({"1-2": 2.0}, 10.0)


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "links.yaml"
    with pytest.raises(ConfigError, match="expected a file with the section plan"):
        plan_words(file)
    file.write_text("train:\n  steps: 3\n")
    with pytest.raises(ConfigError, match=r"train.steps: expected only keys of the section plan"):
        plan_words(file)
    file.write_text("plan: [")
    with pytest.raises(ConfigError, match=r"links.yaml: not valid YAML"):
        plan_words(file)
    with pytest.raises(ConfigError, match="missing"):
        write_plan_file(Path("/dev/null/missing"), "measured", {})


def test_one_process_has_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match="expected several, as in megapipe launch --nproc 2"):
        measure_links(Path("links.yaml"))
