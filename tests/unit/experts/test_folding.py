"""The drawings of docs/moe.md of how experts fold over dp, cp and tp, evaluated."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from megapipe.distributed.mesh import Grid
from megapipe.experts.map import ExpertMap

PAGE = (Path(__file__).parents[3] / "docs/moe.md").read_text(encoding="utf-8")
EXPERTS = 8


def drawings() -> list[list[str]]:
    """Return the lines of each drawing; drawings stand side by side below their sizes."""
    _, _, after = PAGE.partition(f"With {EXPERTS} experts:\n\n")
    lines = after.partition("\n\n")[0].splitlines()
    starts = [found.start() for found in re.finditer(r"(?<=   )\S", lines[0])]
    columns = [slice(*ends) for ends in pairwise([*starts, None])]
    return [[line[column].strip() for line in lines] for column in columns]


def drawn(line: str, name: str) -> list[str]:
    assert line.startswith(name)
    return re.split(r" {2,}", line.removeprefix(name).strip())


def test_each_rank_has_the_experts_that_are_drawn() -> None:
    assert len(drawings()) == 3
    for sizes, ranks, places, experts in drawings():
        axes = {axis: int(size) for axis, size in map(str.split, sizes.split(", "))}
        grid = Grid(**axes)
        names = re.findall("[a-z]+", places)
        at = [grid.coordinates_of(rank) for rank in range(grid.world)]
        assert drawn(ranks, "rank") == [str(rank) for rank in range(grid.world)]
        assert drawn(places, " ".join(names)) == [
            " ".join(str(getattr(each, name)) for name in names) for each in at
        ]
        owners = ExpertMap.even(EXPERTS, grid.ep).owners
        assert experts.split() == ["has"] + [
            "".join(
                str(expert)
                for expert, owner in enumerate(owners)
                if grid.ep_peers(rank)[owner] == rank
            )
            for rank in range(grid.world)
        ]
