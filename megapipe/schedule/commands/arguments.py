"""Arguments that the commands share, and errors in one line."""

import argparse
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from megapipe.command_line import Parser, suggest
from megapipe.config import presets
from megapipe.errors import ConfigError
from megapipe.schedule.cost import plain
from megapipe.schedule.generators import names
from megapipe.schedule.generators.registry import OPTIONS
from megapipe.schedule.ir import MICROBATCH_MASK, STAGE_MASK
from megapipe.schedule.streams.orders import NAMES as STREAMS
from megapipe.schedule.streams.policies import HORIZONS, POLICIES

OF_STAGE = ("F", "I", "W", "B", "R", "reduce", "gather", "update")
"""Costs that each stage may have of its own."""
COSTS = (*OF_STAGE, "comm", "overlap")
PLACEMENTS = ("single", "loop", "v", "wave")
NAME_HELP = "a schedule of `list`, module:function of your own, or a file.csv"

Value = TypeVar("Value")


def add_name(parser: Parser) -> None:
    """Add the argument that names a schedule."""
    suggest(parser.add_argument("name", metavar="NAME", help=NAME_HELP), names)


def add_setting(parser: Parser) -> None:
    """Add the arguments of the setting at which a schedule is built and timed."""
    add_size(parser)
    parser.add_argument("--chunks", type=count, metavar="V", help="virtual stages per rank")
    parser.add_argument("--slices", type=count, metavar="K", help="parts of each sequence")
    parser.add_argument("--group", type=count, metavar="G", help="micro-batches per group")
    parser.add_argument("--pairs", type=count, metavar="N", help="pairs of opposite pipelines")
    parser.add_argument("--replicas", type=counts, metavar="C,C,..", help="ranks of each stage")
    add_stream(parser)
    add_placement(parser)
    add_costs(parser)


def add_stream(parser: Parser) -> None:
    """Add the arguments for streams, in which operations read stale weights."""
    weights = parser.add_argument(
        "--weights",
        metavar="POLICY",
        help="without a flush between updates, with weights as this policy has them: "
        f"{', '.join(POLICIES)}, or module:function of your own; for the schedules "
        f"{', '.join(STREAMS)}. --microbatches are then those of a window, which is an update's",
    )
    suggest(weights, lambda: POLICIES)
    parser.add_argument(
        "--windows", type=count, metavar="N", help="with --weights: windows that are shown (8)"
    )
    parser.add_argument(
        "--advance",
        type=count,
        metavar="A",
        help="1f1b, eager_1f1b: forwards by which each rank is further ahead (none)",
    )
    parser.add_argument(
        "--horizon",
        choices=tuple(HORIZONS),
        help="with --weights predict: up to the update of the micro-batch's window, or until it is "
        "through at the first stage (update)",
    )


def add_size(parser: Parser) -> None:
    """Add the arguments for ranks and micro-batches."""
    parser.add_argument("--ranks", type=count, metavar="P", required=True, help="pipeline ranks")
    parser.add_argument(
        "--microbatches",
        type=microbatches,
        metavar="M",
        required=True,
        help="micro-batches per step",
    )


def add_placement(parser: Parser) -> None:
    """Add the argument that restricts the placement."""
    parser.add_argument(
        "--placement", choices=PLACEMENTS, help="take schedules with this placement only"
    )


def add_costs(parser: Parser) -> None:
    """Add the arguments for costs, replicas, the memory limit and the objective."""
    parser.add_argument(
        "--cost",
        type=costs,
        default={},
        metavar="F=1,I=1,W=1,comm=0",
        help="times per micro-batch and full rank (a chunk takes 1/V of it) and of a message; "
        "B: fused backward (I+W), R: recomputation (F), overlap: share of their sum that two "
        "joined operations take (1); reduce, gather: of a full rank's gradients and of its "
        "parameters, over data-parallel peers, each time that --zero has it (0); update: of a "
        "full rank, with --weights (0)",
    )
    parser.add_argument(
        "--zero",
        type=int,
        choices=range(4),
        default=1,
        help="0, 1: reduce and gather once per step; 2: reduce after each run of one stage's "
        "weight gradients; 3: so, and gather when a stage is needed (1)",
    )
    parser.add_argument(
        "--prefetch",
        type=none_or_more,
        default=1,
        metavar="N",
        help="stages gathered ahead, for --zero 3 (1)",
    )
    parser.add_argument(
        "--buckets",
        type=count,
        default=1,
        metavar="N",
        help="equal buckets of a reduction, which leave one by one during the last operation that "
        "adds gradients (1)",
    )
    parser.add_argument(
        "--chunked-loss",
        action="store_true",
        help="I of the last stage adds to its gradients, as W does",
    )
    parser.add_argument(
        "--stage-cost",
        type=Path,
        metavar="FILE.json",
        help='times of each virtual stage instead: a list of {"F": 1, "I": 1, "W": 1}',
    )
    config = parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE.yaml",
        help="times of the stages of this configuration's model instead, its layers shared out "
        "for each schedule; 1 is the forward of a layer",
    )
    suggest(config, presets.names)
    parser.add_argument(
        "--bandwidth",
        type=number,
        metavar="X",
        help="messages of a whole micro-batch per unit of time (infinite)",
    )
    parser.add_argument(
        "--jitter", type=share, default=0, metavar="X", help="random share of each time (0)"
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of what is random (0)")
    parser.add_argument(
        "--memory-limit",
        type=number,
        metavar="X",
        help="activations per rank, in micro-batches of a full rank",
    )
    parser.add_argument(
        "--freed-by-input-grad",
        type=share,
        metavar="X",
        help="share of an activation that the input gradient frees: 0.634 and 0.568 in 2401.10241, "
        "next to nothing where attention is fused; `weighted` needs it (0 elsewhere)",
    )
    parser.add_argument(
        "--memory-accounting",
        choices=("held", "weighted"),
        default="held",
        help="what the limit counts: activations held from F to W (held), or weighted",
    )
    parser.add_argument(
        "--objective", choices=("makespan", "span"), default="makespan", help="what is to be short"
    )


def options_of(given: argparse.Namespace) -> dict[str, Any]:
    """Options of a generator that were given."""
    return {what: getattr(given, what, None) for what in OPTIONS}


def costs(text: str) -> dict[str, Fraction | int]:
    """``F=1,I=1/2,comm=0.1`` as exact numbers by name."""
    result = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name not in COSTS:
            raise argparse.ArgumentTypeError(
                f"{item!r} is not one of {', '.join(COSTS)} with a value, as in F=1"
            )
        if name in result:
            raise argparse.ArgumentTypeError(f"{name} is given twice")
        result[name] = number(value)
    return result


def number(text: str) -> Fraction | int:
    """An exact number from 0 to 1e30: ``3``, ``1/3``, ``0.366``, or as floats are printed, as in
    ``0.30000000000000004`` and ``1e-05``."""
    shape = r"(\d{1,31}|\d{0,31}\.\d{1,31}|\d{1,31}\.)([eE][+-]?\d{1,3})?|\d{1,31}/0*[1-9]\d{0,30}"
    if re.fullmatch(shape, text, re.ASCII) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 0, as in 3, 0.5 or 1/3")
    exact = plain(Fraction(text))
    assert not isinstance(exact, float)
    if exact > 10**30:
        raise argparse.ArgumentTypeError(f"{text!r} is more than 1e30")
    return exact


def share(text: str) -> Fraction | int:
    """An exact number from 0 to 1."""
    exact = number(text)
    if exact > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 0 to 1")
    return exact


def seed(text: str) -> int:
    """A whole number that is not negative."""
    return _whole(text, 0, 999_999_999)


def count(text: str) -> int:
    """A whole number, 1 or more, of ranks, stages, chunks and the like."""
    return _whole(text, 1, STAGE_MASK + 1)


def counts(text: str) -> list[int]:
    """Whole numbers, 1 or more, as in ``2,1``."""
    return [count(item) for item in text.split(",")]


def none_or_more(text: str) -> int:
    """A whole number, 0 or more, of stages and the like."""
    return _whole(text, 0, STAGE_MASK + 1)


def microbatches(text: str) -> int:
    """A number of micro-batches."""
    return _whole(text, 1, MICROBATCH_MASK)


def _whole(text: str, least: int, most: int) -> int:
    if re.fullmatch(r"\d{1,9}", text, re.ASCII) is None or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
    return int(text)


def write(path: Path, save: Callable[[Path], Value]) -> Value:
    """Call `save` on a path.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        return save(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
