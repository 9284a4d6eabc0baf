"""What a user may get wrong with data, models and their commands, and what is to be said of it."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.parity.bad_folder import (
    cut_off,
    gone,
    in_config,
    in_shard,
    swapped,
    text,
    twice,
    with_manifest,
)
from tests.parity.jobs import arguments, tiny

TRAIN, DATA, CONVERT, GENERATE = (
    "train.py",
    "scripts/prepare_data.py",
    "scripts/convert.py",
    "scripts/generate.py",
)
LONG = "n" * 300
"""A name that no file system takes."""


@dataclass(frozen=True)
class Bad:
    """A mistake: the command and its arguments, the exit code, and words of the one line.

    `prepare` changes the folder, a copy of what `make_folder` makes. `alone`: an
    interpreter of its own runs it too.
    """

    name: str
    script: str
    argv: str | tuple[str, ...]
    code: int
    words: tuple[str, ...]
    prepare: Callable[[Path], object] = lambda folder: None
    ranks: int = 1
    alone: bool = False

    def arguments(self, folder: Path) -> list[str]:
        given = self.argv.split() if isinstance(self.argv, str) else list(self.argv)
        if self.script != TRAIN:
            return given
        usual = {key: value for key, value in tiny(folder).items() if str(folder) not in value}
        usual |= {"data.source": "texts.txt", "parallel.dp": str(self.ranks)}
        return [*arguments(usual), *given]


MIXTURE = "data.source=stdlib data.mixture.a.source=t data.mixture.b.source=texts.txt"
OF_T = ("data.source=t", "data.samples=megatron")
OUTPUT = "--source texts.txt --output out"
READ, WRITE = "hf-to-megapipe hf new", "megapipe-to-hf run new"

OF_DATA = [
    Bad("no such source", DATA, "--source gone.txt", 3, ("corpus 'gone.txt': no such file",)),
    Bad("a source's name is too long", DATA, f"--source {LONG}.txt", 3, ("corpus 'nnn", "name")),
    Bad("a home that is none", DATA, "--source ~nobody-here/x", 3, ("no such file or folder",)),
    Bad("no source at all", DATA, ("--source", ""), 3, ("corpus '': expected a file",)),
    Bad("an empty file", DATA, "--source empty.txt --cache c", 3, ("'empty.txt' is empty",)),
    Bad("a folder without files", DATA, "--source empty --cache c", 3, ("'empty' is empty",)),
    Bad("a pattern without files", DATA, "--source x/*.txt", 3, ("no file matches",)),
    Bad("another field", DATA, "--source rows.jsonl --text-field body --output out", 3,
        ("no field 'body' (data.text_field)", "it has: text, n"), alone=True),
    Bad("another column", DATA, "--source rows.parquet --output out", 3,
        ("rows.parquet: no field 'text'", "it has: body")),
    Bad("a number", DATA, "--source rows.jsonl --text-field n --output out", 3,
        ("field 'n' (data.text_field) holds a number, no text, in line 1",)),
    Bad("deep nesting", DATA, "--source deep.jsonl --output out", 3,
        ("deep.jsonl: cannot be read", "line 1"), text("deep.jsonl", "[" * 10**6)),
    Bad("deep nesting in an array", DATA, "--source deep.json --output out", 3,
        ("deep.json: cannot be read",), text("deep.json", "[" * 10**6)),
    Bad("a truncated .gz", DATA, "--source x.jsonl.gz --output out", 3,
        ("x.jsonl.gz: cannot be unpacked",),
        text("x.jsonl.gz", gzip.compress(b'{"text": "abc"}\n' * 5000)[:-20])),
    Bad("a .gz that is none", DATA, "--source x.txt.gz --output out", 3,
        ("x.txt.gz: cannot be unpacked",), text("x.txt.gz", b"plain")),
    Bad("a .zst that is none", DATA, "--source x.txt.zst --output out", 3,
        ("x.txt.zst: cannot be unpacked",), text("x.txt.zst", b"plain")),
    Bad("token ids already", DATA, "--source t --output out", 2,
        ("--source t: a token file has",)),
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
        ("--validation-fraction is for the cache",)),
    Bad("no workers", DATA, f"{OUTPUT} --workers 0", 2,
        ("--workers 0: expected a whole number >= 1",)),
    Bad("workers in words", DATA, f"{OUTPUT} --workers two", 2, ("--workers", "'two'", "--help")),
    Bad("an unknown option", DATA, "--sauce x", 2, ("--sauce", "--help")),
    Bad("no tokenizer", DATA, f"{OUTPUT} --tokenizer ./gone", 3, ("tokenizer './gone': no such",)),
    Bad("a folder without a tokenizer", DATA, f"{OUTPUT} --tokenizer ./empty", 3,
        ("tokenizer './empty'", "cannot be loaded"), alone=True),
    Bad("a tokenizer without an end", DATA, f"{OUTPUT} --tokenizer ./endless/tokenizer.json", 3,
        ("no end-of-document token", "eos_token")),
    Bad("a tokenizer that is text", DATA, f"{OUTPUT} --tokenizer texts.txt", 3,
        ("cannot be loaded",)),
    Bad("examples without rows", DATA, "--source texts.txt --samples supervised --cache c", 3,
        ("texts.txt: it has no rows",)),
    Bad("examples that are none", DATA, "--source rows.jsonl --samples supervised --cache c", 3,
        ("line 1 has neither 'messages'", "it has: text, n")),
    Bad("few ids to learn", DATA, "tokenizer --source texts.txt --vocab-size 10 --output new", 2,
        ("--vocab-size 10: expected 257",), alone=True),
    Bad("many ids to learn", DATA,
        f"tokenizer --source texts.txt --vocab-size {10**12} --output new", 2, ("expected 257",)),
    Bad("a tokenizer's long name", DATA,
        f"tokenizer --source texts.txt --vocab-size 300 --output {LONG}", 3, ("too long",)),
    Bad("nothing to learn from", DATA,
        "tokenizer --source empty.txt --vocab-size 300 --output new", 3,
        ("'empty.txt' is empty",)),
    Bad("a prefix without .idx", DATA, "inspect t", 3, ("token file t.idx: No such file",),
        gone("t.idx"), alone=True),
    Bad("a prefix without .bin", DATA, "verify t.idx --vocab-size 9", 3,
        ("token file t.bin: No such file",), gone("t.bin"), alone=True),
    Bad("a truncated .bin", DATA, "inspect t", 3, ("t.bin has 3990 bytes", "declares 4000"),
        cut_off("t.bin", 10)),
    Bad("a truncated .idx", DATA, "inspect t", 3, ("t.idx has", "its header declares"),
        cut_off("t.idx", 9)),
    Bad("an empty .idx", DATA, "inspect t", 3, ("t.idx is too short", "0 bytes"),
        text("t.idx", "")),
    Bad("an .idx of something else", DATA, "inspect t", 3, ("t.idx is no token index",),
        text("t.idx", "x" * 100)),
    Bad("files that do not belong together", DATA, "inspect t", 3, ("t.bin has", "declares"),
        swapped),
    Bad("a token file that is a folder", DATA, "inspect empty/t", 3, ("not a regular file",),
        lambda folder: (folder / "empty/t.idx").mkdir()),
    Bad("a document beyond", DATA, "inspect t --first 40", 2, ("--first 40: expected 0 to 39",)),
    Bad("ids outside", DATA, "verify t --vocab-size 9", 3, ("t.bin", "token id 250", "0 to 8")),
    Bad("no vocabulary to verify by", DATA, "verify t", 2,
        ("--tokenizer --vocab-size", "required")),
    Bad("merge into one of them", DATA, "merge t big t", 3, ("t.bin exists: remove",), alone=True),
    Bad("merge what is gone", DATA, "merge out t gone", 3, ("token file gone.idx: No such file",)),
    Bad("merge to a long name", DATA, f"merge {LONG} t t", 3, ("File name too long",)),
    Bad("split that leaves nothing", DATA, "split t a=999 b=1", 3,
        ("b would have none of the 40",), alone=True),
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
        in_config(model_type="opt"), alone=True),
    Bad("a value that cannot be expressed", CONVERT, READ, 2,
        ("config.json", "hidden_act 'relu'", "silu"), in_config(hidden_act="relu")),
    Bad("dynamic rope", CONVERT, READ, 2, ("rope_type 'dynamic'", "yarn"),
        in_config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})),
    Bad("nested config", CONVERT, READ, 5, ("config.json: no JSON",),
        text("hf/config.json", "[" * 10**6)),
    Bad("missing shard", CONVERT, READ, 5,
        ("the shard model-00002-of-00002.safetensors is missing",),
        gone("hf/model-00002-of-00002.safetensors")),
    Bad("a shard that is empty", CONVERT, READ, 5,
        ("model-00002-of-00002.safetensors: not a whole",),
        text("hf/model-00002-of-00002.safetensors", "")),
    Bad("a tensor twice", CONVERT, READ, 5,
        ("model.embed_tokens.weight is in model-00002", "not in model.safetensors.index.json"),
        twice),
    Bad("wrong shape", CONVERT, READ, 5,
        ("lm_head.weight has shape [3, 24]", "asks for [257, 24]"),
        in_shard(lambda state: state.update({"lm_head.weight": torch.ones(3, 24)}))),
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
    Bad("no model at all", CONVERT, "inspect empty", 5, ("empty: neither a checkpoint nor a run",),
        alone=True),
    Bad("a manifest that is cut off", CONVERT, WRITE, 5,
        ("neither a checkpoint nor a run folder",), with_manifest(lambda content: content[:-9]),
        alone=True),
    Bad("shards of infinite size", CONVERT, f"{WRITE} --shard-gb 1e301", 2,
        ("--shard-gb 1e+301",)),
    Bad("type of another kind", CONVERT, f"{WRITE} --dtype int8", 2, ("'int8'", "bf16")),
    Bad("class of another kind", CONVERT, f"{WRITE} --model-type gpt2", 2,
        ("model.norm = rmsnorm",)),
    Bad("text of nothing", GENERATE, "gone", 5, ("gone: no such folder",)),
    Bad("text of a long name", GENERATE, LONG, 5, ("nnn: no such folder",)),
    Bad("text without tokens", GENERATE, "run --tokens 0", 2, ("tokens=0: expected at least 1",)),
    Bad("text in words", GENERATE, "run --tokens ten", 2, ("--tokens", "'ten'", "--help"),
        alone=True),
    Bad("no batch", GENERATE, "run --batch 0", 2, ("--batch", "at least 1")),
    Bad("temperature of nan", GENERATE, "run --temperature nan", 2,
        ("temperature=nan: expected",)),
    Bad("prompts in a folder", GENERATE, "run --prompts empty", 3,
        ("--prompts empty: Is a directory",)),
    Bad("prompts of nothing", GENERATE, "run --prompts empty.txt", 3, ("it is empty",)),
]  # fmt: skip
OF_RUNS = [
    Bad("a NUL", TRAIN, ('data.source="a\\0b"',), 2,
        ("data.source", "expected text without a NUL"), alone=True),
    Bad("a long name", TRAIN, f"data.source={LONG}", 3,
        ("corpus 'nnn", "File name too long"), ranks=2),
    Bad("a long configuration", TRAIN, f"{LONG}.yaml", 2, (": ", "nnn")),
    Bad("a prefix without its index", TRAIN, "data.source=t", 3, ("token file", "t.idx: No such"),
        gone("t.idx"), ranks=2),
    Bad("ids beyond the model", TRAIN, "data.source=big", 3,
        ("token id 69", "0 to 256", "big.bin"), ranks=2),
    Bad("more ids than the model", TRAIN,
        "data.tokenizer=./bpe/tokenizer.json model.vocab_size=257", 2,
        ("model.vocab_size=257", "320")),
    Bad("a tokenizer without its end", TRAIN, "data.tokenizer=./endless/tokenizer.json", 3,
        ("no end-of-document token",), ranks=2),
    Bad("a split of nothing", TRAIN, "data.source=t data.split=0,0,0", 2,
        ("data.split=0,0,0", "expected one above 0"), alone=True),
    Bad("a split that leaves nothing", TRAIN, "data.source=t data.split=0,1", 3,
        ("data.split=0,1 leaves nothing of the 40 sequences",), ranks=2),
    Bad("a split in words", TRAIN, "data.source=t data.split=most", 2,
        ("data.split=most: expected",)),
    Bad("a split of texts", TRAIN, "data.split=9,1", 2, ("data.split=9,1 is for token files",)),
    Bad("zero weights", TRAIN, f"{MIXTURE} data.mixture.a.weight=0 data.mixture.b.weight=0", 2,
        ("data.mixture.a.weight=0: expected a number > 0",)),
    Bad("weights that end", TRAIN,
        (*MIXTURE.split(), "data.mixture.a.weight=[[0,1],[2,0]]", "data.mixture.b.weight=[[0,0]]"),
        2, ("data.mixture: from step 2 on all weights are 0",)),
    Bad("a negative weight", TRAIN, f"{MIXTURE} data.mixture.a.weight=-1", 2,
        ("weight=-1: expected",)),
    Bad("an infinite weight", TRAIN, f"{MIXTURE} data.mixture.a.weight=.inf", 2,
        ("not a finite",)),
    Bad("a weight missing", TRAIN, f"{MIXTURE} data.mixture.a.weight=1", 2, ("missing for b",)),
    Bad("weights too large", TRAIN,
        "data.source=stdlib data.mixture.a.source=t data.mixture.b.source=t data.samples=megatron "
        "data.mixture.a.weight=1e308 data.mixture.b.weight=1e308",
        2, ("of a finite sum",), ranks=2),
    Bad("a mixture that is used up", TRAIN,
        f"{MIXTURE} data.mixture.a.epochs=0.05 data.mixture.b.tokens=20 train.steps=90",
        3, ("tokens and epochs of a, b are used up after", "fewer train.steps"), ranks=2),
    Bad("too little for a sample", TRAIN,
        "data.source=t train.sequence_length=2000", 3,
        ("t.bin has", "one sample needs 2001"), ranks=2),
    Bad("megatron of texts", TRAIN,
        "data.samples=megatron data.document_mask=true data.source=empty.txt", 3,
        ("'empty.txt' is empty",)),
    Bad("fim without tokens", TRAIN, "data.fim_rate=0.5", 2, ("needs data.fim_tokens",)),
    Bad("fim tokens that are none", TRAIN,
        ("data.fim_rate=0.5", "data.fim_tokens=[<p>, <s>, <m>]"), 3, ("has no token '<p>'",),
        ranks=2),
    Bad("a template that is gone", TRAIN,
        "data.samples=supervised data.chat_template=gone.jinja data.source=rows.jsonl", 3,
        ("data.chat_template=gone.jinja: No such file",), ranks=2),
    Bad("a source of no name", TRAIN, ("data.source=''",), 3, ("corpus '': expected a file",)),
    Bad("a URL that fsspec lacks", TRAIN, "data.source=nothing://x/y", 3, ("nothing://x/y",),
        ranks=2),
    Bad("load of nothing", TRAIN, "checkpoint.load=./gone", 5,
        ("checkpoint.load: ./gone: no such",), ranks=2),
    Bad("load of nothing by a URL", TRAIN, "checkpoint.load=memory://gone/run", 5,
        ("checkpoint.load: memory://gone/run: neither a checkpoint",), ranks=2),
    Bad("checkpoints where fsspec has no way", TRAIN, "checkpoint.folder=nothing://x/y", 5,
        ("checkpoint.folder=nothing://x/y: Protocol not known",), ranks=2),
    Bad("load of a file", TRAIN, "checkpoint.load=texts.txt", 5, ("no such folder",)),
    Bad("load of a long name", TRAIN, f"checkpoint.load={LONG}", 5, ("no such folder",), ranks=2),
    Bad("load of an empty folder", TRAIN, "checkpoint.load=empty", 5,
        ("empty is neither a checkpoint", "config.json"), ranks=2),
    Bad("load of the latest of none", TRAIN, "checkpoint.load=latest", 5, ("no run in",), ranks=2),
    Bad("load of an unknown family", TRAIN, "checkpoint.load=hf", 2,
        ("checkpoint.load: ", "'opt'"), in_config(model_type="opt"), ranks=2),
    Bad("load with a missing shard", TRAIN, "checkpoint.load=hf", 5, ("shard model-00002",),
        gone("hf/model-00002-of-00002.safetensors"), ranks=2),
    Bad("load of another model", TRAIN, "checkpoint.load=hf", 5,
        ("hf is of another model", "model.norm is layernorm, there rmsnorm", "--config"), ranks=2),
    Bad("load of a damaged run", TRAIN, "checkpoint.load=run checkpoint.load_only=weights", 5,
        ("checkpoint.load: ", "no checkpoint is intact"),
        cut_off("run/checkpoints/*/*.safetensors", 3), ranks=2),
    Bad("load of some of it", TRAIN, "checkpoint.load=run checkpoint.load_only=most", 2,
        ("checkpoint.load_only=most: expected one of all, weights",)),
    Bad("export of a model that no class has", TRAIN,
        "checkpoint.export_every=2 model.positions=alibi model.norm=rmsnorm", 2,
        ("checkpoint.export_every=2: model.norm = rmsnorm cannot be expressed",)),
    Bad("export now and then", TRAIN, "checkpoint.export_every=-1", 2,
        ("checkpoint.export_every=-1: expected a whole number >= 0",)),
    Bad("a key twice in a file", TRAIN, "twice.yaml", 2,
        ("twice.yaml:3: data.source is given twice",),
        text("twice.yaml", "data:\n  source: a\n  source: b\n")),
]  # fmt: skip


def every() -> Iterator[Bad]:
    """All of them; their names differ."""
    yield from (*OF_DATA, *OF_MODELS, *OF_RUNS)
