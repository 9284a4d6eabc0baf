"""Draws how often each expert was chosen in a step of a run, relative to its layer's mean: a row
for each layer, a column for each expert. A blank is an expert without tokens, "." one with less
than a quarter of the mean; ":-=+*#%" follow in steps of a quarter up to "@", twice the mean or
more, so "+" begins at the mean. Dropped choices count. The log has choices every
log.expert_counts_every steps.

example: experts.py show runs/quickstart_moe --layer 1 -o drift.svg
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megapipe.command_line import Parser
from megapipe.errors import ConfigError
from megapipe.plan.moe.commands.recorded import LOG, Choices, recorded
from megapipe.schedule.commands.arguments import none_or_more, write
from megapipe.schedule.render.scene import IDLE, Rectangle, Scene, Words, mixed
from megapipe.schedule.render.vector import to_svg
from megapipe.text import print_folded, ranges

PURPOSE = "show which experts a run chose, as a heat map"
SHADES = ".:-=+*#%@"
MOST = 2.0
"""Load, in multiples of the mean, from which an expert gets the darkest shade."""
LEFT, TOP, HEIGHT, RIGHT = 76, 30, 18, 170
WIDEST, WHOLE = 18, 1400


def add(parser: Parser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="folder of the run")
    parser.add_argument(
        "--step", type=none_or_more, metavar="N", help="step to show (the newest with choices)"
    )
    parser.add_argument(
        "--layer", type=none_or_more, metavar="N", help="show the steps of this layer as rows"
    )
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write an SVG file")


def run(given: argparse.Namespace) -> None:
    path = given.folder / LOG
    title, rows = _rows(path, recorded(path), given.step, given.layer)
    if given.output is None:
        print_folded(title)
        print("\n".join(text(rows)))
    else:
        drawn = to_svg(scene(title, rows))
        write(given.output, lambda file: file.write_text(drawn, encoding="utf-8"))


class Row(NamedTuple):
    """A row of the drawing: the experts of a layer in a step."""

    label: str
    loads: Sequence[float]
    """Number of choices of each expert, relative to the layer's mean."""

    @classmethod
    def of(cls, label: str, choices: Sequence[int]) -> "Row":
        mean = sum(choices) / len(choices)
        return cls(label, [each / mean for each in choices])

    @property
    def summary(self) -> str:
        """The largest load and the number of experts without tokens, in words."""
        return f"largest {max(self.loads):.2f}, {self.loads.count(0)} without"


def _rows(
    path: Path, choices: Choices, step: int | None, layer: int | None
) -> tuple[str, list[Row]]:
    """Return the title and the rows of a drawing."""
    if step is not None and step not in choices:
        raise ConfigError(f"--step {step}: {path} has the choices of steps {ranges(choices)}")
    if layer is None:
        step = max(choices) if step is None else step
        rows = [Row.of(f"layer {each}", own) for each, own in choices[step].items()]
        return f"step {step}: choices of each expert, relative to the mean of its layer", rows
    if step is not None:
        raise ConfigError("--step cannot be combined with --layer, which shows all steps")
    layers = choices[max(choices)]
    if layer not in layers:
        raise ConfigError(f"--layer {layer} has no experts: expected one of {ranges(layers)}")
    own = {each: choices[each][layer] for each in sorted(choices) if layer in choices[each]}
    rows = [Row.of(f"step {each}", counts) for each, counts in own.items()]
    return f"layer {layer}: choices of each expert, relative to their mean", rows


def text(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the drawing as text: a line per row, with one character per expert between bars."""
    width, most = max(len(row.label) for row in rows), max(len(row.loads) for row in rows)
    for row in rows:
        drawn = f"|{''.join(map(_shade, row.loads))}|".ljust(most + 2)
        yield f"{row.label.rjust(width)} {drawn} {row.summary}"


def _shade(load: float) -> str:
    last = len(SHADES) - 1
    return SHADES[min(last, int(load / MOST * last))] if load else " "


def scene(title: str, rows: Sequence[Row]) -> Scene:
    """Draw one cell per expert and row; a cell is darker if the expert was chosen more often."""
    most = max(len(row.loads) for row in rows)
    cell = min(WIDEST, WHOLE / most)
    drawn = Scene(LEFT + cell * most + RIGHT, TOP + HEIGHT * len(rows) + 8)
    drawn.shapes.append(Words(8, 18, title, anchor="start"))
    for number, row in enumerate(rows):
        y = TOP + HEIGHT * number
        drawn.shapes.append(Words(LEFT - 6, y + 13, row.label, size=10, anchor="end"))
        for expert, load in enumerate(row.loads):
            fill = mixed(load / MOST) if load else IDLE
            drawn.shapes.append(Rectangle(LEFT + cell * expert, y, cell, HEIGHT - 1, fill))
        end = LEFT + cell * len(row.loads) + 6
        drawn.shapes.append(Words(end, y + 13, row.summary, size=10, anchor="start"))
    return drawn
