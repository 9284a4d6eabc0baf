"""Tokenizes a corpus with one process per core; after an interruption the same command continues.
The options are the keys of `data` in a run's configuration.

Without --output the command does what training would do at its start: a run with the same values
finds the corpus in the cache. With --output, all documents are written to PREFIX.bin and
PREFIX.idx, in the format of Megatron-LM; a run reads them with data.source=PREFIX. With
--sample-format supervised, the tokenized examples are always written to the cache.

example: prepare_data.py --source 'texts/*.jsonl.zst' --tokenizer ./tokenizer --output data/texts
"""

import argparse
import time
from pathlib import Path

from megapipe.command_line import Parser
from megapipe.config.data import EXAMPLES, DataConfig
from megapipe.config.section import keys_with
from megapipe.data.commands.arguments import OF_A_CORPUS, add_keys, data_config
from megapipe.data.corpus.files import is_standard_library
from megapipe.data.prepare import prepare
from megapipe.data.prepare.file import prepare_file
from megapipe.data.prepare.sizes import CorpusSizes
from megapipe.data.remote import fetched
from megapipe.data.row_keys import no_rows
from megapipe.data.supervised import prepare_examples
from megapipe.data.tokenizer import load_tokenizer
from megapipe.data.tokens.format import without_suffix
from megapipe.errors import ConfigError
from megapipe.text import print_folded

VALIDATION_FRACTION = DataConfig.model_fields["validation_fraction"].default
PURPOSE = "tokenize a corpus"


def add(parser: Parser) -> None:
    add_keys(parser, *OF_A_CORPUS, "tokenizer")
    parser.add_argument("--output", type=Path, metavar="PREFIX", help="write PREFIX.bin and .idx")
    add_keys(
        parser, "cache", "validation_fraction", "sample_format", *keys_with(DataConfig, EXAMPLES)
    )


def run(given: argparse.Namespace) -> None:
    config = _config(given)
    examples = config.sample_format == "supervised"
    start = time.perf_counter()
    tokenizer = load_tokenizer(config.tokenizer)
    if given.output is not None:
        output = without_suffix(given.output)
        made = prepare_file(config, tokenizer, output)
        written_to, entropy = f"{output}.bin, {output}.idx", made.entropy
        rows = made.rows
        sides = {"all": made.sizes}
    else:
        if examples:
            prepared = prepare_examples(config, tokenizer).prepared
        else:
            prepared = prepare(config, tokenizer)
        meta = prepared.meta
        written_to, entropy = str(prepared.folder), prepared.entropy
        rows = meta.rows
        sides = {"train": meta.train}
        if meta.validation is not None:
            sides["validation"] = meta.validation
    print(f"{written_to} ({time.perf_counter() - start:.1f} s)")
    for name, sizes in sides.items():
        print_folded(f"{name:10}  {_line_of_examples(sizes) if examples else _line(sizes)}")
    if not examples:  # the entropy of all tokens says nothing about the labels
        print_folded(f"{'entropy':10}  {entropy:.4f} nats per token (unigram)")
    for line in rows.lines(config.source, config.text_field):
        print_folded(line)


def _config(given: argparse.Namespace) -> DataConfig:
    """Return the section `data` that the options set, after copying a remote source into the cache.
    Raises :class:`ConfigError` for options that exclude each other."""
    config = data_config(given)
    examples = config.sample_format == "supervised"
    if given.output is not None and config.validation_fraction != VALIDATION_FRACTION:
        raise ConfigError(
            "--validation-fraction works only with the cache: --output writes all documents "
            "into one file"
        )
    if given.output is not None and examples:
        raise ConfigError(
            "--sample-format supervised works only with the cache: an --output file cannot "
            "store the loss mask"
        )
    if examples and is_standard_library(config.source):
        raise no_rows("--source", config.source)
    return fetched(config)


def _line_of_examples(sizes: CorpusSizes) -> str:
    return (
        f"{sizes.documents:,} examples  {sizes.tokens:,} tokens  longest {sizes.longest:,} tokens"
    )


def _line(sizes: CorpusSizes) -> str:
    return (
        f"{sizes.documents:,} documents  {sizes.tokens:,} tokens  {sizes.text_bytes:,} bytes of "
        f"text, {sizes.text_bytes / sizes.tokens:.2f} a token  longest {sizes.longest:,} tokens"
    )
