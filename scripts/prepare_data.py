"""Tokenize a corpus ahead of a run: what training would do itself at its start.

    python scripts/prepare_data.py --source corpus.jsonl --tokenizer ./tokenizer --cache cache

The options are the keys of `data` in a run's config, without the masks; with the same values the
run finds the corpus in the cache.
"""

import argparse
import sys
import time

from pydantic import ValidationError

from megapipe.config import DataConfig
from megapipe.data.prepare import prepare
from megapipe.data.tokenizer import load_tokenizer
from megapipe.errors import ConfigError, MegapipeError


def main() -> int:
    try:
        config = parse()
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


def parse() -> DataConfig:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, field in DataConfig.model_fields.items():
        if field.annotation is bool:  # masks are of training, not of the token files
            continue
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=field.default,
            type=type(field.default) if field.default is not None else str,
            help=f"{field.description} (default: {field.default})".replace("%", "%%"),
        )
    try:
        return DataConfig(**vars(parser.parse_args()))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"data.{first['loc'][0]}={first['input']!r}: {first['msg']}") from error


if __name__ == "__main__":
    sys.exit(main())
