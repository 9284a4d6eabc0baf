"""Trains a tokenizer on a corpus: byte-level BPE like GPT-2's, which can encode every text.

The result loads as data.tokenizer=FOLDER, and with transformers' AutoTokenizer.

example: prepare_data.py tokenizer --source texts --vocab-size 32000 --output ./tokenizer
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megapipe.command_line import Parser, phase
from megapipe.config.data import DataConfig
from megapipe.data.commands.arguments import add_keys, data_config
from megapipe.data.corpus import pieces
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.prepare.progress import Meter, meter
from megapipe.data.prepare.remote_cache import check_contents
from megapipe.data.remote import fetched
from megapipe.data.tokenizer.hugging_face import END_TOKENS
from megapipe.errors import ConfigError, DataError
from megapipe.util.paths import exists

PURPOSE = "train a tokenizer on a corpus"
_BYTES = 256
_MOST = 2**22


def add(parser: Parser) -> None:
    add_keys(parser, "source", "subset", "dataset_split", "text_field", "cache")
    parser.add_argument(
        "--vocab-size",
        type=int,
        required=True,
        metavar="N",
        help="size of the vocabulary, with the 256 bytes and the end mark",
    )
    parser.add_argument(
        "--max-bytes",
        type=int,
        metavar="N",
        help="read only the first N bytes of text (default: the whole corpus)",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="folder to write"
    )


def run(given: argparse.Namespace) -> None:
    config = data_config(given)
    if not _BYTES < given.vocab_size <= _MOST:
        raise ConfigError(
            f"--vocab-size {given.vocab_size}: expected {_BYTES + 1} (bytes and an end mark) to "
            f"{_MOST}"
        )
    if given.max_bytes is not None and given.max_bytes < 1:
        raise ConfigError(f"--max-bytes {given.max_bytes}: expected a whole number >= 1")
    if exists(given.output):
        raise DataError(f"{given.output} exists: remove it or choose another name")
    config = fetched(config)
    check_contents(config.source)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    with phase("loading transformers"):
        from transformers import PreTrainedTokenizerFast

    end = END_TOKENS[0]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=given.vocab_size,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    count = RowCount()
    with meter(f"reading {config.source}", given.max_bytes) as shown:
        tokenizer.train_from_iterator(_texts(config, given.max_bytes, count, shown), trainer)
    learned = tokenizer.get_vocab_size()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)
    try:
        wrapped.save_pretrained(given.output)
    except OSError as error:
        raise DataError(f"{given.output}: {error.strerror or error}") from error
    short = "" if learned == given.vocab_size else " (the corpus is too small for more)"
    print(f"{given.output}: {learned:,} ids, end of documents {end}{short}")
    for line in count.lines(config.source, config.text_field):
        print(line)


def _texts(config: DataConfig, most: int | None, count: RowCount, shown: Meter) -> Iterator[str]:
    """Yield the texts of a corpus until they have `most` bytes in total (None: all), and count the
    corpus's rows in `count`."""
    read = 0
    for piece in pieces(config, count):
        nbytes = len(piece.text.encode())
        shown.advance(nbytes, int(piece.ends))
        yield piece.text
        read += nbytes
        if most is not None and read >= most:
            return
    if not read:
        raise count.no_text(config.source, config.text_field)
