"""Corpora, token files and tokenizers that cannot be used."""

from __future__ import annotations

import gzip
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from megapipe.config.data import DataConfig
from megapipe.data.prepare import prepare
from megapipe.data.stored import write_checksums
from megapipe.data.tokenizer import load_tokenizer
from megapipe.data.tokens import TokenWriter
from tests.parity.bad_folder import LONG, cut_off, gone, swapped, text
from tests.parity.bad_input.case import Bad, all_of, made, mode

MIXTURE = "data.source=stdlib data.mixture.a.source=t data.mixture.b.source=texts.txt"
ROWS = "data.source=own.jsonl"
SUPERVISED = f"{ROWS} data.sample_format=supervised"
TALK = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
LINES = b'{"text": "the cat sat on a mat"}\n' * 5000


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "own.txt")


def in_header(at: int, value: bytes) -> Callable[[Path], object]:
    """Change bytes at an offset of t's index: 9 version, 17 code of the type, 18 sequences, 26
    documents."""

    def change(folder: Path) -> None:
        content = bytearray((folder / "t.idx").read_bytes())
        content[at : at + len(value)] = value
        (folder / "t.idx").write_bytes(content)

    return change


def negative(folder: Path) -> None:
    """Write a token file with an id below 0 in the middle."""
    with TokenWriter(folder / "below", np.dtype("<i4")) as writer:
        for _ in range(40):
            writer.add(np.full(50, 7))
    tokens = np.memmap(folder / "below.bin", dtype="<i4", mode="r+")
    tokens[1000] = -1
    tokens.flush()


def foreign_token(folder: Path) -> None:
    """Write a cached token file with one id beyond the vocabulary, in the middle."""
    (folder / "texts.txt").write_text("the cat sat on a mat and ran away " * 40)
    before = Path.cwd()
    os.chdir(folder)
    try:
        for source in ("texts.txt", str(folder / "texts.txt")):  # as the command may name it
            config = DataConfig(source=source, cache=str(folder / "cache"))
            cached = prepare(config, load_tokenizer("byte"), progress=False)
            tokens = np.memmap(cached.folder / "train.bin", dtype="<u2", mode="r+")
            tokens[len(tokens) // 2] = 300
            tokens.flush()
            write_checksums(cached.folder / "train.bin")
    finally:
        os.chdir(before)


def late(name: str, argv: str | tuple[str, ...], words: tuple[str, ...],
         change: Callable[[Path], object] = lambda folder: None, code: int = 3,
         privileged: bool = True) -> Bad:  # fmt: skip
    """Make a mistake that shows when the corpus is read."""
    return Bad(name, argv, code, words, change, late=True, privileged=privileged)


TEXTS = [
    late("no such file for a corpus", "data.source=gone.txt", ("corpus 'gone.txt': no such file",)),
    late("no name at all", ("data.source=''",), ("corpus '': expected a file",)),
    late("a name that is too long", f"data.source={LONG}", ("corpus 'nnn", "File name too long")),
    late("an empty file", "data.source=empty.txt", ("'empty.txt' is empty",)),
    late("a folder without files", "data.source=empty", ("'empty' is empty",)),
    late("a pattern without files", "data.source=x/*.txt", ("no file matches",)),
    late("a pipe", "data.source=own.txt", ("own.txt", "regular file"), pipe),
    late("a file that must not be read", "data.source=texts.txt",
         ("texts.txt", "Permission denied"), mode("texts.txt", 0), privileged=False),
    late("a folder that must not be read", "data.source=own", ("own", "Permission denied"),
         all_of(made("own"), text("own/a.txt", "text"), mode("own", 0)), privileged=False),
    late("not UTF-8", "data.source=own.txt", ("own.txt", "offset 3"), text("own.txt", b"caf\xe9")),
    late("binary", "data.source=own.bin2", ("own.bin2", "not UTF-8"),
         text("own.bin2", bytes(range(256)) * 50)),
    late("a .gz that is cut off", "data.source=own.jsonl.gz", ("own.jsonl.gz cannot be decomp",),
         text("own.jsonl.gz", gzip.compress(LINES)[:-20])),
    late("a .xz that is cut off", "data.source=own.jsonl.xz",
         ("own.jsonl.xz cannot be decompressed",),
         text("own.jsonl.xz", lzma.compress(LINES)[:-20])),
    late("a .zst that is cut off", "data.source=own.jsonl.zst",
         ("own.jsonl.zst cannot be decompressed",),
         text("own.jsonl.zst", pa.Codec("zstd").compress(LINES, asbytes=True)[:-20])),
    late("a .gz that is none", "data.source=own.txt.gz", ("own.txt.gz cannot be decompressed",),
         text("own.txt.gz", b"plain")),
    late("a .parquet that is none", "data.source=own.parquet", ("own.parquet", "cannot be read"),
         text("own.parquet", b"PAR1x")),
    late("a column that is not there", "data.source=rows.parquet",
         ("rows.parquet: no field 'text' (data.text_field)", "it has: body")),
    late("a field that is not there", "data.source=rows.jsonl data.text_field=body",
         ("rows.jsonl: no field 'body' (data.text_field)", "it has: text, n")),
    late("a field with numbers", "data.source=rows.jsonl data.text_field=n",
         ("field 'n' (data.text_field) holds a number, not text, in line 1",)),
    late("a line that is no JSON", ROWS, ("own.jsonl", "line 2"),
         text("own.jsonl", '{"text": "a"}\n{"text": \n')),
    late("a line that is a list", ROWS, ("own.jsonl", "line 1"), text("own.jsonl", "[1, 2]\n")),
    late("deep nesting", ROWS, ("own.jsonl", "line 1"), text("own.jsonl", "[" * 10**6)),
    late("a URL that nothing opens", "data.source=nothing://x/y", ("nothing://x/y",)),
    late("a URL with a token", "data.source=nothing://x/y?token=s3cret", ("nothing://x/y?***",)),
    Bad("a URL with a password", "data.source=https://me:s3cret@example.org/t.txt", 2,
        ("data.source is a URL with a user name", "put them into the environment")),
    late("a cache that cannot be made", "data.cache=texts.txt/x", ("data.cache", "texts.txt")),
    late("a cache that is a file", "data.cache=t.bin", ("data.cache", "t.bin")),
    late("a cache that must not be written", "data.cache=cache",
         ("data.cache", "Permission denied"),
         all_of(made("cache"), mode("cache", 0o500)), privileged=False),
    late("too little for a sample", "data.source=own.txt train.sequence_length=64",
         ("one sample needs 65",), text("own.txt", "short")),
]  # fmt: skip
EXAMPLES = [
    late("examples without rows", "data.source=texts.txt data.sample_format=supervised",
         ("texts.txt has no rows",)),
    late("examples of which one is half", SUPERVISED,
         ("own.jsonl: line 2 has neither 'messages'", "prompt"),
         text("own.jsonl", '{"prompt": "a", "completion": "b"}\n{"prompt": "c"}\n')),
    late("a chat template that is not there", f"{SUPERVISED} data.chat_template=gone.jinja",
         ("data.chat_template=gone.jinja: No such file",),
         text("own.jsonl", TALK)),
    late("a chat template that is none", f"{SUPERVISED} data.chat_template=own.jinja",
         ("own.jsonl", "the chat template fails"),
         all_of(text("own.jinja", "{% for x in %}"), text("own.jsonl", TALK))),
    Bad("marks to fill in without their names", "data.fim_rate=0.5", 2, ("needs data.fim_tokens",)),
    late("marks that the tokenizer lacks",
         ("data.fim_rate=0.5", "data.fim_tokens=[<p>, <s>, <m>]"),
         ("tokenizer 'byte' has no token '<p>' (data.fim_tokens)",)),
]  # fmt: skip
TOKEN_FILES = [
    late("a prefix without its index", "data.source=t", ("token file", "t.idx: No such"),
         gone("t.idx")),
    late("a prefix without its ids", "data.source=t", ("token file", "t.bin: No such"),
         gone("t.bin")),
    late("ids of another index", "data.source=t", ("t.bin has", "declares"), swapped),
    late("ids that are cut off", "data.source=t", ("t.bin has 3990 bytes", "declares 4000"),
         cut_off("t.bin", 10)),
    late("an index that is cut off", "data.source=t", ("t.idx has", "its header declares"),
         cut_off("t.idx", 9)),
    late("an index that is empty", "data.source=t", ("t.idx is too short", "0 bytes"),
         text("t.idx", "")),
    late("an index of something else", "data.source=t", ("t.idx is not a token index",),
         text("t.idx", "x" * 100)),
    late("an index of another version", "data.source=t", ("t.idx", "version 9"),
         in_header(9, (9).to_bytes(8, "little"))),
    late("an index of an unknown type", "data.source=t", ("t.idx", "type"), in_header(17, b"\x63")),
    late("an index of another type", "data.source=t", ("t.bin has", "declares"),
         in_header(17, b"\x04")),
    late("an index that declares too much", "data.source=t", ("t.idx has", "its header declares"),
         in_header(18, (2**60).to_bytes(8, "little"))),
    late("ids beyond the model", "data.source=big", ("token id 69", "0 to 256", "big.bin")),
    late("ids below 0", "data.source=below train.steps=60",
         ("token id -1 at position 1000 of below.bin", "0 to 256"), negative),
    late("an id beyond, in the middle of the cache",
         "train.steps=60 optimizer.schedule=constant log.every=1000",
         ("token id 300", "0 to 256", "train.bin"), foreign_token),
    late("too few for a sample", "data.source=t train.sequence_length=2000",
         ("data.source=t has", "one sample needs 2001")),
    Bad("a split of nothing", "data.source=t data.split=0,0,0", 2,
        ("data.split=0,0,0", "expected one above 0")),
    late("a split that leaves nothing", "data.source=t data.split=0,1",
         ("data.split=0,1 leaves nothing of the 40 sequences",)),
    Bad("a split of texts", "data.split=9,1", 2,
        ("data.split=9,1 has no effect", "is a text file")),
    Bad("a split in words", "data.source=t data.split=most", 2, ("data.split=most: expected",)),
]  # fmt: skip
MIXTURES = [
    Bad("a weight of 0 for all", f"{MIXTURE} data.mixture.a.weight=0 data.mixture.b.weight=0", 2,
        ("data.mixture.a.weight=0: expected a number > 0",)),
    Bad("weights that end",
        (*MIXTURE.split(), "data.mixture.a.weight=[[0,1],[2,0]]", "data.mixture.b.weight=[[0,0]]"),
        2, ("data.mixture: from step 2 on all weights are 0",)),
    Bad("a weight for one alone", f"{MIXTURE} data.mixture.a.weight=1", 2, ("missing for b",)),
    Bad("a temperature of weights that there are not",
        "data.source=stdlib data.mixture.a.source=t data.mixture.b.source=t "
        "data.sample_format=megatron "
        "data.temperature=2", 2,
        ("data.temperature=2.0 has no effect with data.sample_format=megatron, wh",)),
    Bad("a temperature of 0", f"{MIXTURE} data.temperature=0", 2,
        ("data.temperature=0: expected a number > 0",)),
    Bad("weights too large",
        "data.source=stdlib data.mixture.a.source=t data.mixture.b.source=t "
        "data.sample_format=megatron "
        "data.mixture.a.weight=1e308 data.mixture.b.weight=1e308", 2,
        ("data.mixture: weights", "of a finite sum")),
    Bad("a key of a source that is none", f"{MIXTURE} data.mixture.a.wieght=1", 2,
        ("data.mixture.a.wieght=1: unknown key; expected data.mixture.NAME",)),
    Bad("a source without its name", "data.source=stdlib data.mixture.a.epochs=1", 2,
        ("expected data.mixture.a.source too",)),
    late("a mixture that is used up",
         f"{MIXTURE} data.mixture.a.epochs=0.05 data.mixture.b.tokens=20 train.steps=90",
         ("tokens and epochs of a, b are used up after", "fewer train.steps")),
    Bad("a share above 1", "data.validation_fraction=1.5", 2,
        ("data.validation_fraction=1.5: expected a number >= 0 and < 1",)),
]  # fmt: skip
TOKENIZERS = [
    Bad("no such tokenizer", "data.tokenizer=./gone", 3, ("tokenizer './gone': no such",)),
    Bad("a folder without a tokenizer", "data.tokenizer=./empty", 3,
        ("tokenizer './empty'", "cannot be loaded")),
    Bad("a tokenizer that is text", "data.tokenizer=texts.txt", 3,
        ("'texts.txt': cannot be loaded",)),
    Bad("a tokenizer without an end", "data.tokenizer=./endless/tokenizer.json", 3,
        ("no end-of-document token", "eos_token")),
    Bad("a tokenizer with more ids than the model",
        "data.tokenizer=./bpe/tokenizer.json model.vocab_size=257", 2,
        ("model.vocab_size=257", "320")),
    Bad("a tokenizer that must not be read", "data.tokenizer=./bpe/tokenizer.json", 3,
        ("bpe/tokenizer.json", "Permission denied"), mode("bpe/tokenizer.json", 0),
        privileged=False),
    Bad("a tokenizer of tiktoken's that is none", "data.tokenizer=tiktoken:gone", 3,
        ("tiktoken:gone",)),
]  # fmt: skip
CORPORA = [*TEXTS, *EXAMPLES, *TOKEN_FILES, *MIXTURES, *TOKENIZERS]
