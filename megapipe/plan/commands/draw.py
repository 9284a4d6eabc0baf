"""Draws the ring plan of a configuration: which rank computes which tile of scores in which round.
A cell "3:1" stands for the queries of rank 3 and the keys of rank 1; "-" is a round in which the
rank is idle. In the SVG a cell is darker if more of its scores are computed.

example: context.py draw parallel.cp=4 context.algorithm=teams context.team_size=2 -o teams.svg
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megapipe.command_line import Parser
from megapipe.context.plan import Message, Plan
from megapipe.context.positions import Positions
from megapipe.context.score_rects import score_rects
from megapipe.errors import ConfigError
from megapipe.layout.context_checks import split_of
from megapipe.layout.context_plan import context_plans
from megapipe.layout.model_spec import model_spec_of
from megapipe.plan.commands.arguments import add_configuration, configuration
from megapipe.schedule.render.scene import IDLE, Rectangle, Scene, Words, mixed
from megapipe.schedule.render.vector import to_svg
from megapipe.text import count_noun, print_folded, table

PURPOSE = "draw which rank computes which tile in which round"
CELL, HEIGHT, LEFT, TOP = 58, 26, 64, 40


def add(parser: Parser) -> None:
    add_configuration(parser)
    parser.add_argument("--backward", action="store_true", help="draw the plan of the backward")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write an SVG file")


def run(given: argparse.Namespace) -> None:
    config = configuration(given)
    split = split_of(config)
    plans = context_plans(config, split, model_spec_of(config).kernel_needs.attention)
    plan = plans.backward if given.backward else plans.forward
    blocks = split.local([config.train.sequence_length], 0).blocks
    words = f"{plan.name}, {split.order}: {split.ring} ranks, {plan.length} rounds"
    if given.output is not None:
        try:
            given.output.write_text(to_svg(scene(plan, blocks, words)), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"-o {given.output}: {error.strerror}") from None
        return
    print_folded(words, text(plan, blocks, plan.backward if given.backward else plan.forward))


def share(blocks: tuple[Positions, ...], pair: tuple[int, int] | None) -> float:
    """Return the fraction of a tile's scores that are computed, not masked. `pair`: the ranks of
    its queries and keys."""
    if pair is None:
        return 0.0
    queries, keys = blocks[pair[0]], blocks[pair[1]]
    computed = sum(entry.scores for entry in score_rects(queries, keys))
    return computed / (queries.count * keys.count)


def label(blocks: tuple[Positions, ...], pair: tuple[int, int] | None) -> str:
    return f"{pair[0]}:{pair[1]}" if pair is not None and share(blocks, pair) else "-"


def text(plan: Plan, blocks: tuple[Positions, ...], exchanges: Sequence[Sequence[Message]]) -> str:
    """Format the plan: a row per rank, a column per round, and the number of messages."""
    rows = [["", *(f"round {number}" for number in range(plan.length))]]
    for rank in range(plan.ranks):
        cells = [label(blocks, pairs[rank]) for pairs in plan.rounds]
        rows.append([f"rank {rank}", *cells])
    sent = Counter(message.what for exchange in exchanges for message in exchange)
    gradients, results = sent["gradient"], sent["partial"]
    more = count_noun(gradients, "gradient") if gradients else count_noun(results, "result")
    return (
        f"{table(rows, left=len(rows[0]))}\n{count_noun(sent['bundle'], 'shard')} and {more} "
        f"sent; a rank has at most {plan.max_bundles['keys']} KV and "
        f"{count_noun(plan.max_bundles['queries'], 'query shard')} in memory, including its own"
    )


def scene(plan: Plan, blocks: tuple[Positions, ...], words: str) -> Scene:
    """Draw the plan as shapes."""
    drawn = Scene(LEFT + CELL * plan.length + 8, TOP + HEIGHT * plan.ranks + 8)
    drawn.shapes.append(Words(8, 16, words, anchor="start"))
    for number, pairs in enumerate(plan.rounds):
        x = LEFT + CELL * number
        drawn.shapes.append(Words(x + CELL / 2, 33, f"round {number}", size=9))
        for rank, pair in enumerate(pairs):
            y, part = TOP + HEIGHT * rank, share(blocks, pair)
            fill = mixed(part) if part else IDLE
            drawn.shapes.append(Rectangle(x, y, CELL - 2, HEIGHT - 2, fill))
            drawn.shapes.append(Words(x + CELL / 2 - 1, y + 16, label(blocks, pair)))
    for rank in range(plan.ranks):
        drawn.shapes.append(Words(8, TOP + HEIGHT * rank + 16, f"rank {rank}", anchor="start"))
    return drawn
