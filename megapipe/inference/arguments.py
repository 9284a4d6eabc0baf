"""Command-line options that name a model, and the loading of that model."""

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
    """Add the options that name a model and its layout."""
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a run folder (its newest intact checkpoint), a checkpoint, a Hugging Face "
        "folder, or latest: the run in runs/ with the newest checkpoint",
    )
    group = parser.add_argument_group("model")
    group.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="tokenizer, named as in data.tokenizer (default: the run's or folder's)",
    )
    group.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="maximum number of tokens that the model sees (default: its training length)",
    )
    add_layout(parser)


def model_of(given: argparse.Namespace) -> Model:
    """Load the model that the options name, split over the ranks of ``given.mesh``.

    Raises a :class:`~megapipe.errors.MegapipeError` if the model cannot be loaded.
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
    """Return a :func:`~megapipe.command_line.phase` that prints `what` on rank 0 only."""
    return phase(what) if given.mesh.rank == 0 else contextlib.nullcontext()
