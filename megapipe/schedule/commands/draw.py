"""``draw``: draw one schedule for a page or a trace viewer."""

import argparse
import json
from pathlib import Path

from megapipe.command_line import Commands, Parser
from megapipe.errors import ConfigError
from megapipe.schedule.commands.arguments import add_name, add_setting, count, write
from megapipe.schedule.commands.scenario import Scenario
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.render import png, svg
from megapipe.schedule.timing.simulate import Timeline
from megapipe.schedule.timing.trace import trace

FORMATS = (".svg", ".png", ".json")


def add(commands: "Commands[Parser]") -> None:
    parser = commands.add_parser("draw", help="draw one schedule for a page or a trace viewer")
    add_name(parser)
    add_setting(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        required=True,
        help="FILE.svg, FILE.png or FILE.json (a trace for ui.perfetto.dev, 1 ms per unit of time)",
    )
    parser.add_argument(
        "--width", type=count, default=1600, metavar="PIXELS", help="width of the time line (1600)"
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    path: Path = given.output
    if path.suffix not in FORMATS:
        raise ConfigError(f"argument -o: {path} does not end in {', '.join(FORMATS)}")
    setting = Scenario.of(given)
    schedule, _ = setting.build(given.name)
    validate(schedule)
    timeline = setting.time(schedule)
    write(path, lambda path: draw(timeline, path, given.width))
    print(path)


def draw(timeline: Timeline, path: Path, width: int) -> None:
    """Write a drawing in the format of the file's suffix."""
    if path.suffix == ".png":
        png(timeline, path, width=width)
    elif path.suffix == ".svg":
        path.write_text(svg(timeline, width=width), encoding="utf-8")
    else:
        path.write_text(json.dumps(trace({"predicted": timeline})), encoding="utf-8")
