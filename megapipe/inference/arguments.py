"""Options by which commands name a model, and the model that they name."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING

from megapipe.command_line import Parser, phase
from megapipe.errors import ConfigError
from megapipe.inference.job import add_layout
from megapipe.util import heartbeat

if TYPE_CHECKING:
    from megapipe.inference.model import Model


def add_model(parser: Parser) -> None:
    """Add the options for a model and for where it is."""
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a run folder (its newest intact checkpoint), a checkpoint, a folder of Hugging "
        "Face's, or latest: the run in runs/ that has saved last",
    )
    group = parser.add_argument_group("model")
    group.add_argument(
        "--tokenizer", metavar="NAME", help="as data.tokenizer (default: the run's or folder's)"
    )
    group.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="most tokens that the model sees at a time (default: those that it was trained on)",
    )
    add_layout(parser)


def model_of(given: argparse.Namespace) -> Model:
    """The model that the options name, over the ranks of ``given.mesh``.

    Raises a :class:`~megapipe.errors.MegapipeError` for one that cannot be had.
    """
    from megapipe.inference.model import load_model
    from megapipe.train.resume.choose import find_weights

    if given.context is not None and given.context < 1:
        raise ConfigError(f"--context {given.context}: expected at least 1")
    with model_phase(given, "reading the model"):
        source = find_weights(given.path, given.mesh)
        assert source.weights is not None
        if given.mesh.rank == 0:
            for line in source.notes():
                heartbeat.print_notice(line)
        return load_model(
            source.weights,
            given.mesh.device,
            given.mesh,
            tokenizer=given.tokenizer,
            context=given.context,
        )


def model_phase(given: argparse.Namespace, what: str) -> contextlib.AbstractContextManager[None]:
    """:func:`~megapipe.command_line.phase`, on the first rank of ``given.mesh``."""
    return phase(what) if given.mesh.rank == 0 else contextlib.nullcontext()
