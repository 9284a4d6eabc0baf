"""Arguments that the commands share."""

import argparse
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from megapipe.command_line import Parser, suggest
from megapipe.config import presets
from megapipe.errors import ConfigError
from megapipe.schedule.async_schedules.orders import NAMES as STREAMS
from megapipe.schedule.async_schedules.policies import HORIZONS, POLICIES
from megapipe.schedule.cost import plain
from megapipe.schedule.generators import names
from megapipe.schedule.generators.registry import OPTIONS
from megapipe.schedule.ir import MICROBATCH_MASK, STAGE_MASK

OF_STAGE = ("F", "I", "W", "B", "R", "reduce", "gather", "update")
"""Names of costs that can differ between stages."""
COSTS = (*OF_STAGE, "comm", "overlap")
PLACEMENTS = ("single", "loop", "v", "wave", "m")
NAME_HELP = "a schedule of `list`, your own module:function, or a file.csv"

Value = TypeVar("Value")


def add_name(parser: Parser) -> None:
    """Add the argument that names a schedule."""
    suggest(parser.add_argument("name", metavar="NAME", help=NAME_HELP), names)


def add_setting(parser: Parser) -> None:
    """Add the arguments for which a schedule is built and timed: sizes, options and costs."""
    add_size(parser)
    parser.add_argument("--chunks", type=count, metavar="V", help="virtual stages per rank")
    parser.add_argument(
        "--sequence-slices", dest="slices", type=count, metavar="K", help="slices of each sequence"
    )
    parser.add_argument(
        "--microbatch-group-size", type=count, metavar="G", help="micro-batches per group"
    )
    parser.add_argument(
        "--chimera-pairs", type=count, metavar="N", help="pairs of opposite pipelines"
    )
    parser.add_argument(
        "--ranks-per-stage", type=counts, metavar="C,C,..", help="ranks of each stage"
    )
    add_stream(parser)
    add_placement(parser)
    add_costs(parser)


def add_stream(parser: Parser) -> None:
    """Add the arguments for no-flush schedules, whose operations read stale weights."""
    weights = parser.add_argument(
        "--weight-versions",
        metavar="POLICY",
        help="make a no-flush schedule, whose operations read the weight versions that this policy "
        f"says: {', '.join(POLICIES)}, or your own module:function. NAME is one of "
        f"{', '.join(STREAMS)}, and --microbatches the number per update",
    )
    suggest(weights, lambda: POLICIES)
    parser.add_argument(
        "--windows",
        type=count,
        metavar="N",
        help="with --weight-versions: number of updates to simulate or draw (8)",
    )
    parser.add_argument(
        "--extra-warmup",
        type=count,
        metavar="A",
        help="1f1b, eager_1f1b: additional warm-up forwards of each rank (0)",
    )
    parser.add_argument(
        "--prediction-horizon",
        choices=tuple(HORIZONS),
        help="with --weight-versions predict: time for which weights are predicted: update (the "
        "default), when the micro-batch's update begins, or round_trip, when its backward at the "
        "first stage ends",
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
        "--placement", choices=PLACEMENTS, help="use only schedules with this placement"
    )


def add_costs(parser: Parser) -> None:
    """Add the arguments for costs, replicas, the activation limit and the objective."""
    parser.add_argument(
        "--cost",
        type=costs,
        default={},
        metavar="F=1,I=1,W=1,comm=0",
        help="times of a whole micro-batch on a full rank (a chunk takes 1/V of it): F, I, W, B "
        "(fused backward, I+W), R (recomputation, F); comm: time of a message (0); overlap: time "
        "of two joined operations as a share of their sum (1); reduce, gather: time to reduce a "
        "full rank's gradients or gather its parameters once over data-parallel peers (0); update: "
        "time of a full rank's update, with --weight-versions (0)",
    )
    parser.add_argument(
        "--zero",
        type=int,
        choices=range(4),
        default=1,
        help="0, 1: reduce and gather once per step; 2: reduce after each run of one stage's "
        "weight gradients; 3: like 2, and gather a stage's parameters when it needs them (1)",
    )
    parser.add_argument(
        "--prefetch",
        type=none_or_more,
        default=1,
        metavar="N",
        help="number of stages whose parameters are gathered ahead, for --zero 3 (1)",
    )
    parser.add_argument(
        "--buckets",
        type=count,
        default=1,
        metavar="N",
        help="number of equal buckets of a reduction; they start one by one during the last "
        "operation that adds gradients (1)",
    )
    parser.add_argument(
        "--chunked-loss",
        action="store_true",
        help="I of the last stage computes weight gradients too, as with a chunked loss",
    )
    parser.add_argument(
        "--stage-cost",
        type=Path,
        metavar="FILE.json",
        help='read the times of each virtual stage instead: a list of {"F": 1, "I": 1, "W": 1}',
    )
    config = parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE.yaml",
        help="derive the times of the stages from this configuration's model instead; its layers "
        "are split into stages for each schedule, and 1 is the time of a layer's forward",
    )
    suggest(config, presets.names)
    parser.add_argument(
        "--bandwidth",
        type=number,
        metavar="X",
        help="number of whole micro-batches that a link sends per unit of time (infinite)",
    )
    parser.add_argument(
        "--jitter",
        type=share,
        default=0,
        metavar="X",
        help="random change of times, as a share (0)",
    )
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="seed of random numbers (0)"
    )
    parser.add_argument(
        "--activation-limit",
        type=number,
        metavar="X",
        help="maximum activations per rank, in micro-batches of a full rank",
    )
    parser.add_argument(
        "--freed-by-input-grad",
        type=share,
        metavar="X",
        help="share of an activation that the input gradient frees: 0.634 and 0.568 in 2401.10241, "
        "about 0 with fused attention; required by --memory-accounting weighted, else 0",
    )
    parser.add_argument(
        "--memory-accounting",
        choices=("held", "weighted"),
        default="held",
        help="whether --activation-limit counts a whole activation until W (held), or without the "
        "share that I has freed (weighted)",
    )
    parser.add_argument(
        "--objective", choices=("makespan", "span"), default="makespan", help="the time to minimise"
    )


def options_of(given: argparse.Namespace) -> dict[str, Any]:
    """Return the options of generators that were given on the command line."""
    return {what: getattr(given, what, None) for what in OPTIONS}


def costs(text: str) -> dict[str, Fraction | int]:
    """Parse ``F=1,I=1/2,comm=0.1`` as exact numbers by name."""
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
    """Parse an exact number from 0 to 1e30, such as ``3``, ``1/3``, ``0.366`` or ``1e-05``."""
    shape = r"(\d{1,31}|\d{0,31}\.\d{1,31}|\d{1,31}\.)([eE][+-]?\d{1,3})?|\d{1,31}/0*[1-9]\d{0,30}"
    if re.fullmatch(shape, text, re.ASCII) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 0, as in 3, 0.5 or 1/3")
    exact = plain(Fraction(text))
    assert not isinstance(exact, float)
    if exact > 10**30:
        raise argparse.ArgumentTypeError(f"{text!r} is more than 1e30")
    return exact


def share(text: str) -> Fraction | int:
    """Parse an exact number from 0 to 1."""
    exact = number(text)
    if exact > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 0 to 1")
    return exact


def seed(text: str) -> int:
    """Parse a whole number that is not negative."""
    return _whole(text, 0, 999_999_999)


def count(text: str) -> int:
    """Parse a number of ranks, stages or chunks: a whole number, 1 or more."""
    return _whole(text, 1, STAGE_MASK + 1)


def counts(text: str) -> list[int]:
    """Parse whole numbers, 1 or more, as in ``2,1``."""
    return [count(item) for item in text.split(",")]


def none_or_more(text: str) -> int:
    """Parse a whole number, 0 or more, such as a number of stages."""
    return _whole(text, 0, STAGE_MASK + 1)


def microbatches(text: str) -> int:
    """Parse a number of micro-batches."""
    return _whole(text, 1, MICROBATCH_MASK)


def _whole(text: str, least: int, most: int) -> int:
    if re.fullmatch(r"\d{1,9}", text, re.ASCII) is None or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
    return int(text)


def write(path: Path, save: Callable[[Path], Value]) -> Value:
    """Write a file by calling `save` with its path.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        return save(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
