"""Mistakes of users with the commands for data and models, and the errors that they should get."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.parity.bad_folder import (
    LONG,
    cut_off,
    gone,
    in_config,
    in_shard,
    swapped,
    text,
    twice,
    with_manifest,
)
from tests.parity.bad_input.corpora import in_header

DATA, CONVERT, GENERATE, EVALUATE = (
    "scripts/prepare_data.py",
    "scripts/convert.py",
    "scripts/generate.py",
    "scripts/evaluate.py",
)


@dataclass(frozen=True)
class Bad:
    """A mistake: the command and its arguments, the exit code, and words of the error line.

    `prepare` changes the folder, a copy of what `make_folder` makes. `chosen`: one of the few cases
    of scripts that load torch that run in an interpreter of their own.
    """

    name: str
    script: str
    argv: str | tuple[str, ...]
    code: int
    words: tuple[str, ...]
    prepare: Callable[[Path], object] = lambda folder: None
    chosen: bool = False

    @property
    def alone(self) -> bool:
        """Whether it needs an interpreter of its own, which takes seconds if torch is loaded."""
        return self.chosen or self.script == DATA

    @property
    def command(self) -> str:
        """Name of the command, or the command that options alone stand for."""
        first = self.arguments()[0]
        return "tokenize" if self.script == DATA and first.startswith("--") else first

    def arguments(self) -> list[str]:
        return self.argv.split() if isinstance(self.argv, str) else list(self.argv)


OUTPUT = "--source texts.txt --output out"
READ, WRITE = "hf-to-megapipe hf new", "megapipe-to-hf run new"

OF_TEXTS = [
    Bad("no such source", DATA, "--source gone.txt", 3, ("corpus 'gone.txt': no such file",)),
    Bad("a source's name is too long", DATA, f"--source {LONG}.txt", 3, ("corpus 'nnn", "name")),
    Bad("a home that is none", DATA, "--source ~nobody-here/x", 3, ("no such file or folder",)),
    Bad("no source at all", DATA, ("--source", ""), 3, ("corpus '': expected a file",)),
    Bad("an empty file", DATA, "--source empty.txt --cache c", 3, ("'empty.txt' is empty",)),
    Bad("a folder without files", DATA, "--source empty --cache c", 3, ("'empty' is empty",)),
    Bad("a pattern without files", DATA, "--source x/*.txt", 3, ("no file matches",)),
    Bad("another field", DATA, "--source rows.jsonl --text-field body --output out", 3,
        ("no field 'body' (data.text_field)", "it has: text, n")),
    Bad("another column", DATA, "--source rows.parquet --output out", 3,
        ("rows.parquet: no field 'text'", "it has: body")),
    Bad("a number", DATA, "--source rows.jsonl --text-field n --output out", 3,
        ("field 'n' (data.text_field) holds a number, not text, in line 1",)),
    Bad("deep nesting", DATA, "--source deep.jsonl --output out", 3,
        ("deep.jsonl: cannot be read", "line 1"), text("deep.jsonl", "[" * 10**6)),
    Bad("deep nesting in an array", DATA, "--source deep.json --output out", 3,
        ("deep.json: cannot be read",), text("deep.json", "[" * 10**6)),
    Bad("a truncated .gz", DATA, "--source x.jsonl.gz --output out", 3,
        ("x.jsonl.gz cannot be decompressed",),
        text("x.jsonl.gz", gzip.compress(b'{"text": "abc"}\n' * 5000)[:-20])),
    Bad("a .gz that is none", DATA, "--source x.txt.gz --output out", 3,
        ("x.txt.gz cannot be decompressed",), text("x.txt.gz", b"plain")),
    Bad("a .zst that is none", DATA, "--source x.txt.zst --output out", 3,
        ("x.txt.zst cannot be decompressed",), text("x.txt.zst", b"plain")),
    Bad("token ids already", DATA, "--source t --output out", 2,
        ("--source t: a token file already has",)),
    Bad("the output is there", DATA, "--source texts.txt --output t", 3,
        ("t.bin exists: remove",)),
    Bad("the output is there, by its file", DATA, "--source texts.txt --output t.idx", 3,
        ("t.bin exists: remove",)),
    Bad("an output below a file", DATA, "--source texts.txt --output texts.txt/x", 3,
        ("texts.txt: File exists",)),
    Bad("an output with a long name", DATA, f"--source texts.txt --output {LONG}", 3,
        ("File name too long",)),
    Bad("a cache that is a file", DATA, "--source texts.txt --cache t.bin", 3,
        ("data.cache", "t.bin")),
    Bad("a share above 1", DATA, f"{OUTPUT} --validation-fraction 1.5", 2,
        ("--validation-fraction 1.5: expected a number >= 0 and < 1",)),
    Bad("a share of nan", DATA, "--source texts.txt --validation-fraction nan", 2,
        ("--validation-fraction nan: expected a number",)),
    Bad("a share of nothing", DATA, f"{OUTPUT} --validation-fraction 0.12345678901234567", 2,
        ("--validation-fraction works only with the cache",)),
    Bad("no workers", DATA, f"{OUTPUT} --tokenizer-workers 0", 2,
        ("--tokenizer-workers 0: expected a whole number >= 1",)),
    Bad("workers in words", DATA, f"{OUTPUT} --tokenizer-workers two", 2,
        ("--tokenizer-workers", "'two'", "--help")),
    Bad("an unknown option", DATA, "--sauce x", 2, ("--sauce", "--help")),
    Bad("no tokenizer", DATA, f"{OUTPUT} --tokenizer ./gone", 3, ("tokenizer './gone': no such",)),
    Bad("a folder without a tokenizer", DATA, f"{OUTPUT} --tokenizer ./empty", 3,
        ("tokenizer './empty'", "cannot be loaded")),
    Bad("a tokenizer without an end", DATA, f"{OUTPUT} --tokenizer ./endless/tokenizer.json", 3,
        ("no end-of-document token", "eos_token")),
    Bad("a tokenizer that is text", DATA, f"{OUTPUT} --tokenizer texts.txt", 3,
        ("cannot be loaded",)),
    Bad("examples without rows", DATA, "--source texts.txt --sample-format supervised --cache c", 3,
        ("texts.txt has no rows",)),
    Bad("examples that are none", DATA, "--source rows.jsonl --sample-format supervised --cache c",
        3, ("line 1 has neither 'messages'", "it has: text, n")),
    Bad("few ids to learn", DATA, "tokenizer --source texts.txt --vocab-size 10 --output new", 2,
        ("--vocab-size 10: expected 257",)),
    Bad("many ids to learn", DATA,
        f"tokenizer --source texts.txt --vocab-size {10**12} --output new", 2, ("expected 257",)),
    Bad("a tokenizer's long name", DATA,
        f"tokenizer --source texts.txt --vocab-size 300 --output {LONG}", 3, ("too long",)),
    Bad("nothing to learn from", DATA,
        "tokenizer --source empty.txt --vocab-size 300 --output new", 3,
        ("'empty.txt' is empty",)),
]  # fmt: skip
OF_TOKEN_FILES = [
    Bad("a prefix without .idx", DATA, "inspect t", 3, ("token file t.idx: No such file",),
        gone("t.idx")),
    Bad("a prefix without .bin", DATA, "verify t.idx --vocab-size 9", 3,
        ("token file t.bin: No such file",), gone("t.bin")),
    Bad("a truncated .bin", DATA, "inspect t", 3, ("t.bin has 3990 bytes", "declares 4000"),
        cut_off("t.bin", 10)),
    Bad("an oversized .bin", DATA, "inspect t", 3, ("t.bin has 1048576 bytes", "declares 4000"),
        text("t.bin", bytes(2**20))),
    Bad("a truncated .idx", DATA, "inspect t", 3, ("t.idx has", "its header declares"),
        cut_off("t.idx", 9)),
    Bad("an empty .idx", DATA, "inspect t", 3, ("t.idx is too short", "0 bytes"),
        text("t.idx", "")),
    Bad("an .idx of billions of documents", DATA, "merge out t", 3,
        ("t.idx has 842 bytes", "declares"), in_header(18, b"\xff" * 7)),
    Bad("ids of a type that no token has", DATA, "split t a=1 b=1", 3,
        ("t.idx declares token type 7",), in_header(17, b"\x07")),
    Bad("ids of another type", DATA, "verify t --vocab-size 300", 3,
        ("t.bin has 4000 bytes", "declares"), in_header(17, b"\x04")),
    Bad("an .idx of something else", DATA, "inspect t", 3, ("t.idx is not a token index",),
        text("t.idx", "x" * 100)),
    Bad("files that do not belong together", DATA, "inspect t", 3, ("t.bin has", "declares"),
        swapped),
    Bad("a token file that is a folder", DATA, "inspect empty/t", 3, ("not a regular file",),
        lambda folder: (folder / "empty/t.idx").mkdir()),
    Bad("a document beyond", DATA, "inspect t --first 40", 2, ("--first 40: expected 0 to 39",)),
    Bad("ids outside", DATA, "verify t --vocab-size 9", 3, ("t.bin", "token id 250", "0 to 8")),
    Bad("no vocabulary to verify by", DATA, "verify t", 2,
        ("--tokenizer --vocab-size", "required")),
    Bad("merge into one of them", DATA, "merge t big t", 3, ("t.bin exists: remove",)),
    Bad("merge what is gone", DATA, "merge out t gone", 3, ("token file gone.idx: No such file",)),
    Bad("merge to a long name", DATA, f"merge {LONG} t t", 3, ("File name too long",)),
    Bad("split that leaves nothing", DATA, "split t a=999 b=1", 3,
        ("b would have none of the 40",)),
    Bad("split with nan", DATA, "split t a=nan b=1", 2, ("a=nan: expected OUTPUT=SHARE",)),
    Bad("split with a negative share", DATA, "split t a=-1 b=1", 2,
        ("a=-1: expected OUTPUT=SHARE",)),
    Bad("split with shares of nothing", DATA, "split t a=0 b=0", 2,
        ("a=0: expected OUTPUT=SHARE",)),
    Bad("split with shares too large", DATA, "split t a=1e308 b=1e308", 2, ("sum of the shares",)),
    Bad("split into one twice", DATA, "split t a=1 a.bin=1", 2, ("a is given twice",)),
]  # fmt: skip
OF_MODELS = [
    Bad("unknown family", CONVERT, READ, 2, ("model_type 'opt' is not supported", "gpt2, llama"),
        in_config(model_type="opt"), chosen=True),
    Bad("a value that cannot be expressed", CONVERT, READ, 2,
        ("config.json", "hidden_act 'relu'", "silu"), in_config(hidden_act="relu")),
    Bad("dynamic rope", CONVERT, READ, 2, ("rope_type 'dynamic'", "yarn"),
        in_config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})),
    Bad("nested config", CONVERT, READ, 5, ("config.json is not JSON",),
        text("hf/config.json", "[" * 10**6)),
    Bad("missing shard", CONVERT, READ, 5,
        ("the shard model-00002-of-00002.safetensors is missing",),
        gone("hf/model-00002-of-00002.safetensors"), chosen=True),
    Bad("a shard that is empty", CONVERT, READ, 5,
        ("model-00002-of-00002.safetensors is not a complete",),
        text("hf/model-00002-of-00002.safetensors", "")),
    Bad("a tensor twice", CONVERT, READ, 5,
        ("model.embed_tokens.weight is in model-00002", "not in model.safetensors.index.json"),
        twice),
    Bad("wrong shape", CONVERT, READ, 5,
        ("lm_head.weight has shape [3, 24]", "asks for [257, 24]"),
        in_shard(lambda state: state.update({"lm_head.weight": torch.ones(3, 24)})), chosen=True),
    Bad("wrong type", CONVERT, READ, 5, ("lm_head.weight is I32", "BF16, F16, F32, F64"),
        in_shard(lambda state: state.update({"lm_head.weight": state["lm_head.weight"].int()}))),
    Bad("tokenizer without eos", CONVERT, f"{READ} --tokenizer ./endless/tokenizer.json", 3,
        ("no end-of-document token",)),
    Bad("tokenizer with more ids", CONVERT, f"{READ} --tokenizer ./bpe/tokenizer.json", 2,
        ("has 320 ids", "has 257")),
    Bad("output is there", CONVERT, "hf-to-megapipe hf run", 5, ("run exists already",)),
    Bad("output with a long name", CONVERT, f"megapipe-to-hf run {LONG}", 5,
        ("File name too long",)),
    Bad("source with a long name", CONVERT, f"inspect ./{LONG}", 5, ("no such folder",)),
    Bad("no model at all", CONVERT, "inspect empty", 5, ("empty is neither a checkpoint nor a",),
        chosen=True),
    Bad("a manifest that is cut off", CONVERT, WRITE, 5,
        ("neither a checkpoint nor a run folder",), with_manifest(lambda content: content[:-9]),
        chosen=True),
    Bad("shards of infinite size", CONVERT, f"{WRITE} --shard-gb 1e301", 2,
        ("--shard-gb 1e+301",)),
    Bad("type of another kind", CONVERT, f"{WRITE} --dtype int8", 2, ("'int8'", "bf16")),
    Bad("class of another kind", CONVERT, f"{WRITE} --model-type gpt2", 2,
        ("model.norm = rmsnorm",)),
    Bad("text of nothing", GENERATE, "gone", 5, ("gone: no such folder",)),
    Bad("text of a long name", GENERATE, LONG, 5, ("nnn: no such folder",)),
    Bad("text without tokens", GENERATE, "run --max-new-tokens 0", 2,
        ("--max-new-tokens 0: expected at least 1",)),
    Bad("text in words", GENERATE, "run --max-new-tokens ten", 2,
        ("--max-new-tokens", "'ten'", "--help"),
        chosen=True),
    Bad("no batch", GENERATE, "run --batch 0", 2, ("--batch", "at least 1")),
    Bad("temperature of nan", GENERATE, "run --temperature nan", 2,
        ("--temperature nan: expected",)),
    Bad("prompts in a folder", GENERATE, "run --prompts empty", 3,
        ("--prompts empty: Is a directory",)),
    Bad("prompts of nothing", GENERATE, "run --prompts empty.txt", 3, ("empty.txt is empty",)),
]  # fmt: skip

OF_OTHERS = [
    Bad("Megatron's that is gone", CONVERT, "megatron-to-megapipe gone new", 5,
        ("gone is not a Megatron-LM checkpoint", "iter_"), chosen=True),
    Bad("Megatron's of an iteration that is gone", CONVERT, "megatron-to-megapipe empty new", 5,
        ("names iter_0000007, which has no checkpoint",),
        text("empty/latest_checkpointed_iteration.txt", "7")),
    Bad("Megatron's in shards of nothing", CONVERT,
        "megatron-to-megapipe empty new --shard-gb 0", 2, ("--shard-gb 0.0: expected a number",)),
    Bad("DCP's without an index", CONVERT, "dcp-to-megapipe empty new", 5,
        ("cannot read empty/.metadata",), chosen=True),
    Bad("DCP's with an index of something else", CONVERT,
        "dcp-to-megapipe empty new --config hf", 5,
        ("empty/.metadata is not a complete DCP index",), text("empty/.metadata", "nothing")),
    Bad("no model for DCP", CONVERT, "megapipe-to-dcp empty new", 5,
        ("empty is neither a checkpoint nor a run folder",), chosen=True),
    Bad("output for DCP is there", CONVERT, "megapipe-to-dcp run hf", 5, ("hf exists already",)),
    Bad("type of another kind for DCP", CONVERT, "megapipe-to-dcp run new --dtype int8", 2,
        ("'int8'", "bf16")),
    Bad("nothing to measure", EVALUATE, "perplexity run", 2,
        ("expected either --data or --text",)),
    Bad("no model to measure", EVALUATE, "perplexity gone --text abc", 5,
        ("gone: no such folder",)),
    Bad("measured on what is gone", EVALUATE, "perplexity run --data gone.txt", 3,
        ("corpus 'gone.txt': no such file",), chosen=True),
    Bad("measured at no stride", EVALUATE, "perplexity run --data texts.txt --stride 0", 2,
        ("--stride 0: expected 1 to 19",)),
    Bad("questions without a prompt", EVALUATE, "multiple-choice run --data rows.jsonl", 3,
        ("rows.jsonl: line 1: expected a text as 'prompt' or 'question'",)),
    Bad("an answer that is no choice", EVALUATE, "multiple-choice run --data q.jsonl", 3,
        ("q.jsonl: line 1: 'answer' is 2", "0 to 1"),
        text("q.jsonl", '{"prompt": "a", "choices": ["b", "c"], "answer": 2}'), chosen=True),
    Bad("tasks of nothing", EVALUATE, "harness run", 2, ("--tasks", "required"), chosen=True),
]  # fmt: skip


def every() -> Iterator[Bad]:
    """Yield all mistakes; their names differ."""
    yield from (*OF_TEXTS, *OF_TOKEN_FILES, *OF_MODELS, *OF_OTHERS)
