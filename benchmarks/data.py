"""Texts to token files, and token files to samples: ``python benchmarks/data.py``.

The corpus is the source text of Python's standard library, as JSONL, twice; the tokenizer is a BPE
of 32,000 ids that is trained on a part of it. Ours is the command that users call, with all that it
does: start, read, tokenize, write, flush. Each side runs in separate processes, in turns; times are
medians of wall time, as several processes work. Indices of token files are in token_indices.py.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from common import Result, parser, report
from token_indices import index_claims

from megapipe.config.data import DataConfig
from megapipe.data.corpus import pieces
from megapipe.data.tokens.format import Header, bin_of, idx_of
from megapipe.errors import DataError

TRAIN = [sys.executable, str(Path(__file__).parents[1] / "train.py")]
COMMAND = [sys.executable, str(Path(__file__).parents[1] / "scripts" / "prepare_data.py")]
DATASETS = """
import sys
from datasets import disable_progress_bars, load_dataset
from transformers import PreTrainedTokenizerFast
corpus, file, cache, processes = sys.argv[1:]
disable_progress_bars()
tokenizer = PreTrainedTokenizerFast(tokenizer_file=file)
texts = load_dataset("json", data_files=corpus, split="train", cache_dir=cache)
texts.map(
    lambda rows: {"ids": tokenizer(rows["text"], add_special_tokens=False)["input_ids"]},
    batched=True, remove_columns=texts.column_names, num_proc=int(processes) or None,
    load_from_cache_file=False,
)
"""
ENCODE = """
import json, sys, time
from tokenizers import Tokenizer
corpus, file = sys.argv[1:]
tokenizer = Tokenizer.from_file(file)
texts = [json.loads(line)["text"] for line in open(corpus)]
start = time.perf_counter()
for first in range(0, len(texts), 256):
    tokenizer.encode_batch_fast(texts[first : first + 256], add_special_tokens=False)
print(time.perf_counter() - start)
"""
ITS = """
import sys, time
import numpy as np, torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
source, output = sys.argv[1:]
tokens = np.fromfile(source + ".bin", np.uint16)
bounds = np.append(0, np.flatnonzero(tokens == 256) + 1)
start = time.perf_counter()
builder = IndexedDatasetBuilder(output + ".bin", dtype=np.uint16)
for first, last in zip(bounds, bounds[1:]):
    builder.add_document(torch.from_numpy(tokens[first:last].astype(np.int64)), [last - first])
builder.finalize(output + ".idx")
print(time.perf_counter() - start)
"""
OURS = """
import sys, time
from pathlib import Path
import numpy as np
from megapipe.data.tokens import TokenWriter
source, output = sys.argv[1:]
tokens = np.fromfile(source + ".bin", np.uint16)
bounds = np.append(0, np.flatnonzero(tokens == 256) + 1)
start = time.perf_counter()
with TokenWriter(Path(output), np.dtype("<u2")) as writer:
    for first, last in zip(bounds, bounds[1:]):
        writer.add(tokens[first:last].astype(np.int64))
print(time.perf_counter() - start)
"""
OPEN = """
import sys, time
from pathlib import Path
import numpy as np
from megapipe.data.dataset import TokenDataset
from megapipe.data.tokens import TokenFile

def private():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous")) / 1024

before, start = private(), time.perf_counter()
file = TokenFile(Path(sys.argv[1]))
opened = time.perf_counter() - start
dataset = TokenDataset(file, 1024)
for index in np.random.default_rng(0).integers(0, len(dataset), 1000):
    dataset.labelled(int(index))
file.starts(file.documents[np.arange(0, len(file), 1000)])
print(opened, private() - before)
"""
DELIVER = """
import sys, time
from megapipe.cli import parse
from megapipe.data.build import build_batches
from megapipe.data.sources import load_sources
from megapipe.data.tokenizer import load_tokenizer
from megapipe.layout.resolve import resolve

tokenizer = load_tokenizer("byte")
config = resolve(parse(sys.argv[1:]).config, 1, tokenizer.vocab_size)[0]
training, _ = build_batches(config, tokenizer, load_sources(config, tokenizer))
batch, batches = config.train.global_batch, 200
training.rows(range(batch))
start = time.perf_counter()
for number in range(1, batches + 1):
    training.rows(range(number * batch, (number + 1) * batch))
seconds = time.perf_counter() - start
print(batches * batch * config.train.sequence_length / seconds)
"""
DOCUMENTS, LARGE = 5_000_000, 100_000_000
"""Documents of the file that is opened, and of the file that the claim is about."""


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    given = parser(__doc__.partition("\n")[0]).parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), quick=given.quick)
    report("Data", results, given.json)
    return 0


def measure(folder: Path, *, quick: bool) -> list[Result]:
    corpus = write_corpus(folder / "corpus.jsonl", 3 if quick else None)
    tokenizer = train(corpus, folder / "tokenizer", 300 if quick else 32000)
    return [
        *tokenizing(folder, corpus, tokenizer, rounds=1 if quick else 3),
        memory(folder, corpus),
        *writing(folder, corpus, rounds=1 if quick else 5),
        *opening(folder, 1000 if quick else DOCUMENTS),
        refusing(folder, rounds=1 if quick else 9),
        *delivering(folder, corpus, steps=4 if quick else 40),
        *index_claims(folder, quick=quick),
    ]


def tokenizing(folder: Path, corpus: Path, tokenizer: Path, rounds: int) -> list[Result]:
    def map_(processes: int) -> float:
        given = corpus, tokenizer, folder / "hf", processes
        return wall([sys.executable, "-c", DATASETS, *map(str, given)])

    median = medians(
        {
            "one": lambda: wall(ours(corpus, tokenizer, 1)),
            "two": lambda: wall(ours(corpus, tokenizer, 2)),
            "map": lambda: map_(0),
            "map with 2 processes": lambda: map_(2),
            "encode": lambda: printed(ENCODE, corpus, tokenizer, RAYON_NUM_THREADS="2"),
        },
        rounds,
    )
    size = f"{corpus.stat().st_size / 1e6:.0f} MB in {median['two']:.1f} s"

    def result(claim: str, side: str, target: float, peer: str) -> Result:
        claim = f"tokenize and write, 2 processes, {claim}"
        return Result(claim, median[side] / median["two"], target, "x", peer, at_least=True)

    return [
        result("beside datasets.map", "map", 4, f"datasets.map, batched; {size}"),
        result("its processes", "map with 2 processes", 1, "datasets.map, batched, num_proc=2"),
        result("beside encoding alone", "encode", 0.9, "encode_batch_fast alone, 2 threads"),
        result("beside one", "one", 1.7, "1 process"),
    ]


def memory(folder: Path, corpus: Path) -> Result:
    """Measure the largest process of the command, for four times the corpus."""
    four = folder / "four.jsonl"
    four.write_bytes(corpus.read_bytes() * 4)
    small, large = (peak(ours(path, Path("byte"), 2)) for path in (corpus, four))
    claim = f"memory of the largest process, corpus of {four.stat().st_size / 1e6:.0f} MB"
    peer = f"a quarter of it, {small / 2**20:.0f} MiB"
    return Result(claim, large / small, 1.1, "x", peer)


def writing(folder: Path, corpus: Path, rounds: int) -> list[Result]:
    """Write documents of int64 ids, one after another, into a token file. Tokens are bytes and
    256."""
    source = folder / "source"
    subprocess.run(ours(corpus, Path("byte"), 2, source), check=True, capture_output=True)
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        print("megatron-core is not installed: its writer is left out", file=sys.stderr)
        return []
    output = folder / "written"
    median = medians(
        {
            "ours": lambda: printed(OURS, source, output),
            "its": lambda: printed(ITS, source, output),
        },
        rounds,
    )
    peer = f"megatron-core {version}'s builder"
    return [Result("write documents", median["its"] / median["ours"], 1, "x", peer, at_least=True)]


def opening(folder: Path, documents: int) -> list[Result]:
    """Open and read a file of many documents of 100 tokens, all of them 0, in a new process."""
    prefix = folder / "many"
    lengths = np.full(documents, 100, "<i4")
    with idx_of(prefix).open("wb") as file:
        file.write(Header(np.dtype("<u2"), documents, documents + 1).pack())
        file.write(lengths.data)
        file.write((np.arange(documents, dtype="<i8") * 200).data)
        file.write(np.arange(documents + 1, dtype="<i8").data)
    bin_of(prefix).touch()
    os.truncate(bin_of(prefix), documents * 200)
    seconds, mebibytes = map(float, run_here(OPEN, prefix).split())
    size = f"{documents:,} documents"
    return [
        Result("open a token file", seconds, 1, "s", size),
        Result(
            "its memory in a process that read 1000 samples, for 100 million documents by "
            "proportion",
            max(mebibytes, 0.0) * LARGE / documents,
            50,
            "MiB",
            f"{mebibytes:.2f} MiB at {size}",
        ),
    ]


def refusing(folder: Path, rounds: int) -> Result:
    """Time how the command refuses a token file that is cut, in a line."""
    prefix = folder / "cut"
    idx_of(prefix).write_bytes(Header(np.dtype("<u2"), 10**9, 10**9 + 1).pack())
    bin_of(prefix).touch()
    command = [*COMMAND, "inspect", str(prefix)]
    median = medians(
        {
            "ours": lambda: refused(command),
            "imports": lambda: wall([sys.executable, "-c", "import numpy, pydantic"]),
        },
        rounds,
    )
    peer = f"starting Python with numpy and pydantic: {median['imports']:.2f} s"
    return Result("refuse a cut file of a billion documents", median["ours"], 1, "s", peer)


def delivering(folder: Path, corpus: Path, steps: int) -> list[Result]:
    """Compare tokens per second that one thread delivers with those that the quick start's model
    takes when one process trains it."""
    here = folder / "delivery"
    for name in "ab":
        subprocess.run(ours(corpus, Path("byte"), 2, here / name), check=True, capture_output=True)
    common = [
        *("quickstart", "parallel={dp: 1, tp: 1, pp: 1}", "pipeline={schedule: 1f1b, chunks: 1}"),
        *(
            f"run.folder={here}",
            f"train.steps={steps}",
            "optimizer.warmup_steps=0",
        ),
    ]
    one = f"data.source={here / 'a'}"
    subprocess.run([*TRAIN, *common, one], check=True, capture_output=True)
    lines = map(json.loads, (here / "quickstart" / "log.jsonl").read_text().splitlines())
    taken = statistics.median(line["tokens_per_second"] for line in lines if line["kind"] == "step")
    mixture = [f"data.mixture.{name}.source={here / name}" for name in "ab"]
    return [
        Result(
            f"tokens delivered, {name}",
            statistics.median(float(run_here(DELIVER, *common, *given)) for _ in range(3)) / taken,
            50,
            "x",
            f"a step of the quick start's model, {taken:,.0f} tokens/s",
            at_least=True,
        )
        for name, given in (
            ("windows", [one]),
            ("a mixture", mixture),
            ("packed documents", [one, "data.sample_format=packed", f"data.cache={here}"]),
        )
    ]


def ours(corpus: Path, tokenizer: Path, workers: int, output: Path | None = None) -> list[str]:
    """Return the command, with an output that does not exist yet."""
    output = output or corpus.with_name(f"out{time.monotonic_ns()}")
    given = ["--source", str(corpus), "--tokenizer", str(tokenizer), "--output", str(output)]
    return [*COMMAND, *given, "--workers", str(workers)]


def medians(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the median time of each side, the sides taking turns."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in list(sides)[:: -1 if number % 2 else 1]:
            times[side].append(sides[side]())
    return {side: statistics.median(seconds) for side, seconds in times.items()}


def wall(command: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def refused(command: Sequence[str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    assert done.returncode == DataError.exit_code, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return seconds


def printed(program: str, *given: Path, **environ: str) -> float:
    """Return the seconds that a program prints as its time."""
    return float(run_here(program, *given, **environ))


def run_here(program: str, *given: Path | str, **environ: str) -> str:
    command = [sys.executable, "-c", program, *map(str, given)]
    root = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": root, **environ}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout


def peak(command: Sequence[str]) -> int:
    """Return the bytes of the largest of the processes of a command."""
    program = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, "
        "stdout=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command], check=True, capture_output=True, text=True
    )
    return int(done.stdout) * 1024


def write_corpus(path: Path, files: int | None) -> Path:
    """Write texts of the standard library, all of them or the first ones, twice."""
    texts = [piece.text for piece in islice(pieces(DataConfig()), files)]
    with path.open("w") as file:
        for text in texts * 2:
            file.write(json.dumps({"text": text}) + "\n")
    return path


def train(corpus: Path, folder: Path, vocab_size: int) -> Path:
    given = ["--source", str(corpus), "--vocab-size", str(vocab_size), "--output", str(folder)]
    command = [*COMMAND, "tokenizer", *given, "--max-bytes", "8000000"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "tokenizer.json"


if __name__ == "__main__":
    sys.exit(main())
