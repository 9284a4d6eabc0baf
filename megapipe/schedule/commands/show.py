"""``show``: draw one schedule in the terminal."""

import argparse
import shutil

from megapipe.command_line import Commands, Parser
from megapipe.schedule.async_schedules.staleness import staleness
from megapipe.schedule.commands.arguments import add_name, add_setting, count
from megapipe.schedule.commands.measure import stale_table
from megapipe.schedule.commands.scenario import Scenario
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.render.scene import INK, shade
from megapipe.schedule.render.terminal import TextDrawing, draw_rows
from megapipe.text import columns, print_folded


def add(commands: "Commands[Parser]") -> None:
    parser = commands.add_parser("show", help="draw one schedule in the terminal")
    add_name(parser)
    add_setting(parser)
    parser.add_argument(
        "--width", type=count, metavar="COLUMNS", help="width (that of the terminal)"
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    setting = Scenario.of(given)
    schedule, _ = setting.build(given.name)
    validate(schedule)
    width = given.width or shutil.get_terminal_size((100, 24)).columns
    paint(draw_rows(setting.time(schedule), width=width))
    if schedule.updates is not None:
        stages = [stage._asdict() for stage in staleness(schedule)]
        print(*stale_table(stages), sep="\n")


def paint(drawing: TextDrawing) -> None:
    """Print a drawing, in colour if the terminal has colours."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, width=columns())
    for row in (*drawing.rows, drawing.legend):
        line = Text()
        for words, part in row:
            style = ""
            if part is not None:
                style = f"{INK} on {shade(part.op.kind, part.chunk, drawing.chunks)}"
            line.append(words, style)
        line.rstrip()
        console.print(line, soft_wrap=row is not drawing.legend)
    print_folded(drawing.summary)
