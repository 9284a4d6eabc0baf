"""The command that tokenizes: ``python scripts/prepare_data.py --source corpus.jsonl``."""

import argparse
import sys
import time
from collections.abc import Sequence

from pydantic import ValidationError

from megapipe.config import DataConfig
from megapipe.data.own import is_own
from megapipe.data.prepare import prepare
from megapipe.data.tokenizer import load_tokenizer
from megapipe.errors import ConfigError, MegapipeError
from megapipe.keys import expected
from megapipe.section import documentation

DESCRIPTION = """\
Tokenizes a corpus ahead of a run: what training would do itself at its start. The options are the
keys of `data` in a run's configuration, without the masks; with the same values the run finds the
corpus in the cache.
"""
EXAMPLE = "example: %(prog)s --source corpus.jsonl --tokenizer ./tokenizer --cache cache"


def main(argv: Sequence[str]) -> int:
    """Tokenize; returns the exit code."""
    try:
        config = parse(argv)
        start = time.perf_counter()
        prepared = prepare(config, load_tokenizer(config.tokenizer))
    except MegapipeError as error:
        print(f"megapipe: error: {error}", file=sys.stderr)
        return error.exit_code
    meta = prepared.meta
    print(f"{prepared.folder} ({time.perf_counter() - start:.1f} s)")
    for name, split in (("train", meta.train), ("validation", meta.validation)):
        print(
            f"{name:10}  {split.documents:,} documents  {split.tokens:,} tokens  "
            f"{split.text_bytes:,} bytes of text"
        )
    print(f"{'entropy':10}  {meta.entropy:.4f} nats per token (unigram)")
    return 0


def parse(argv: Sequence[str]) -> DataConfig:
    """The corpus and tokenizer that `argv` describes. Raises :class:`ConfigError`."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, field in DataConfig.model_fields.items():
        if field.annotation is bool:  # masks are of training, not of the token files
            continue
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=field.default,
            type=type(field.default) if field.default is not None else str,
            help=f"{documentation(DataConfig)[name]} (default: {field.default})".replace("%", "%%"),
        )
    try:
        config = DataConfig(**vars(parser.parse_args(argv)))
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        words = expected(DataConfig.model_fields[key])
        raise ConfigError(f"--{key.replace('_', '-')} {first['input']}: expected {words}") from None
    if is_own(config.source):
        raise ConfigError(
            f"--source {config.source}: a data set of your own has token ids already, and there is "
            "nothing to prepare"
        )
    return config
