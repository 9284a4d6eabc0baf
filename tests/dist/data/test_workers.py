"""Several processes tokenize: the same files whatever their number, and after any end of theirs."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megapipe.config.data import DataConfig
from megapipe.data.corpus import corpus_shards, parts, text_chunks
from megapipe.data.prepare import encode, prepare
from megapipe.data.prepare import file as file_module
from megapipe.data.prepare.encode import finished, prefix_of
from megapipe.data.prepare.file import prepare_file
from megapipe.data.prepare.workers import encode_all
from megapipe.data.tokenizer import ByteTokenizer, TokenIds, Tokenizer, load_tokenizer
from megapipe.data.tokens import TokenFile
from megapipe.data.tokens.atomic_files import rename_noreplace
from megapipe.errors import DataError
from megapipe.util.process_pool import PROGRAM, ProcessPool, cores
from tests.unit.data.data_cases import TEXTS

SCRIPT = Path(__file__).parents[3] / "scripts" / "prepare_data.py"
ROWS = 6000


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Make a corpus of three parts."""
    path = tmp_path / "x.jsonl"
    with path.open("w") as file:
        for i in range(ROWS):
            file.write(json.dumps({"text": f"{i} " + TEXTS[i % 60] * 40}) + "\n")
    return path


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def nothing(part: corpus_shards.CorpusShard, summary: encode.Summary, was_done: bool) -> None:
    """Ignore the report of a step."""


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_their_number_changes_nothing(
    bpe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_shards, "PART", 10000)
    corpus = tmp_path / "x.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 10))
    assert len(list(parts(DataConfig(source=str(corpus))))) > 6
    made = []
    for number in (1, 3):
        config = DataConfig(
            source=str(corpus), cache=str(tmp_path / str(number)), tokenizer_workers=number
        )
        tokenizer = load_tokenizer(str(bpe_file))
        made.append(prepare(config, tokenizer, progress=False))
        assert list(Path(config.cache).iterdir()) == [made[-1].folder]
    one, three = made
    assert content(one.folder) == content(three.folder)
    assert one.digest == three.digest
    assert one.meta.train.documents + one.meta.validation.documents == 10 * len(TEXTS)


@pytest.mark.parametrize(("room", "left"), [(5_000, []), (40_000, [".parts"])])
def test_a_disk_that_fills_leaves_whole_parts_and_no_more(
    room: int, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first is tokenized, or while all of them are joined: then the next preparation has
    nothing to tokenize."""
    monkeypatch.setattr(corpus_shards, "PART", 10000)
    corpus = tmp_path / "x.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 10))
    config = DataConfig(source=str(corpus), cache=str(tmp_path / "cache"), tokenizer_workers=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(DataError, match=r"^cache .*/cache.* \(data\.cache\): File too large$"):
            prepare(config, ByteTokenizer(), progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.suffix for path in Path(config.cache).iterdir()] == left
    if left:
        monkeypatch.delattr(ProcessPool, "_start")
    made = prepare(config, ByteTokenizer(), progress=False)
    assert [*Path(config.cache).iterdir()] == [made.folder]


@pytest.mark.full
def test_a_killed_preparation_goes_on_where_it_was(corpus: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole" / "x"
    command = [sys.executable, str(SCRIPT), "--source", str(corpus), "--tokenizer-workers", "1"]
    subprocess.run([*command, "--output", str(whole)], check=True, capture_output=True)

    killed = tmp_path / "killed" / "x"
    process = subprocess.Popen([*command, "--output", str(killed)], stderr=subprocess.PIPE)
    wait_for(lambda: list(killed.parent.glob(".x.*.parts/000001.idx")))
    workers = [Path("/proc", pid) for pid in children(process.pid)]
    assert workers
    process.kill()
    process.communicate()
    assert not list(killed.parent.glob("x.*"))
    (kept,) = killed.parent.glob(".x.*.parts")
    before = {path: path.stat().st_mtime_ns for path in kept.glob("0*.idx")}
    assert len(before) >= 2
    wait_for(lambda: not any(worker.exists() for worker in workers))

    # a part whose file was cut short is made again, the others are taken as they are
    os.truncate(kept / "000001.bin", 100)
    process = subprocess.Popen(
        [*command, "--output", str(killed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err.decode()
    assert b"is gone: taking over" in err
    assert f"{ROWS:,} documents".encode() in out
    assert content(whole.parent) == content(killed.parent)


def children(pid: int) -> list[str]:
    """Return the processes that a process has started and that are still there."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return " ".join(task.read_text() for task in tasks).split()


def test_finished_parts_are_not_made_again(corpus: Path, tmp_path: Path) -> None:
    config = DataConfig(source=str(corpus))
    count = encode_all(parts(config), ByteTokenizer(), tmp_path, 2, nothing)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("0*")}
    assert len(times) == 3 * count
    (tmp_path / "000001.idx").unlink()
    documents: list[int] = []
    again = encode_all(
        parts(config),
        ByteTokenizer(),
        tmp_path,
        2,
        lambda part, summary, was_done: documents.append(len(summary.text_bytes)),
    )
    assert again == count
    assert sum(documents) == ROWS
    assert len(documents) == count
    changed = {path.name for path in times if path.stat().st_mtime_ns != times[path]}
    assert changed == {"000001.bin", "000001.idx", "000001.npz"}


class Dies(ByteTokenizer):
    """Ends its process without a word when it reads the last rows."""

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        if any(text.startswith(f"{ROWS - 1} ") for text in texts):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_batch(texts)


class Fails(ByteTokenizer):
    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        raise ZeroDivisionError("of the tokenizer")


class Foreign(ByteTokenizer):
    vocab_size = 100


@pytest.mark.parametrize(
    ("tokenizer", "error", "says"),
    [
        (
            Dies(),
            DataError,
            r"shard \d+; exit code -9: it was killed.*data.tokenizer_workers",
        ),
        (Fails(), RuntimeError, "ZeroDivisionError: of the tokenizer"),
        (Foreign(), DataError, r"token id \d+ is outside the vocabulary \(0 to 99\)"),
    ],
    ids=["dies", "fails", "foreign"],
)
def test_a_process_that_fails(
    corpus: Path, tmp_path: Path, tokenizer: Tokenizer, error: type[Exception], says: str
) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    with pytest.raises(error, match=says):
        encode_all(parts(DataConfig(source=str(corpus))), tokenizer, folder, 2, nothing)


def test_an_interrupt_ends_all_processes(corpus: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--source", str(corpus), "--output", str(tmp_path / "o/x")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    wait_for(lambda: list((tmp_path / "o").glob(".x.*.parts/.0*")))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    assert not list((tmp_path / "o").glob("x*"))
    assert not list((tmp_path / "o").glob(".x.*[0-9]/*"))


def test_a_script_without_a_guard_is_not_run_again(corpus: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from megapipe.config.data import DataConfig\n"
        "from megapipe.data.prepare import prepare\n"
        "from megapipe.data.tokenizer import ByteTokenizer\n"
        "print('once')\n"
        f"prepare(DataConfig(source={str(corpus)!r}, tokenizer_workers=2), ByteTokenizer())\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "once\n", "")


def test_parts_are_asked_for_when_there_is_a_process_for_them(corpus: Path, tmp_path: Path) -> None:
    """So a corpus that is read while it is tokenized is not held in memory."""
    done = 0
    ahead = []

    def watched() -> Iterator[corpus_shards.CorpusShard]:
        for number, part in enumerate(parts(DataConfig(source=str(corpus)))):
            ahead.append(number - done)
            yield part

    def step(part: corpus_shards.CorpusShard, summary: encode.Summary, was_done: bool) -> None:
        nonlocal done
        done += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_shards, "PART", 2**21)
        encode_all(watched(), ByteTokenizer(), tmp_path, 2, step)
    assert len(ahead) > 6
    assert max(ahead) <= 2


def test_halves_of_characters_that_json_can_spell(tmp_path: Path, bpe_file: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude42"}\n')
    for tokenizer in (ByteTokenizer(), load_tokenizer(str(bpe_file))):
        (part,) = parts(DataConfig(source=str(tmp_path / "x.jsonl")))
        summary = encode.encode(part, tokenizer, tmp_path / "0")
        assert summary.text_bytes.tolist() == [3, 4]
        ids = TokenFile(tmp_path / "0").tokens[:]
        assert tokenizer.decode(ids.tolist()) == "a?b🙂"


def test_summary_of_a_part(tmp_path: Path, bpe_file: Path) -> None:
    tokenizer = load_tokenizer(str(bpe_file))
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    (part,) = parts(DataConfig(source=str(tmp_path / "x.jsonl")))
    summary = encode.encode(part, tokenizer, prefix_of(tmp_path, 3))
    stored = finished(tmp_path / "000003", part)
    assert stored is not None
    for one in (summary, stored):
        assert one.text_bytes.tolist() == [len(text.encode()) for text in TEXTS]
        counts = np.bincount(TokenFile(tmp_path / "000003").tokens[:], minlength=400)
        assert np.flatnonzero(counts).tolist() == one.ids.tolist()
        assert counts[one.ids].tolist() == one.counts.tolist()
    for name in ("000003.npz", "000003.idx", "000003.bin"):
        for damage in (lambda path: os.truncate(path, 10), os.unlink):
            kept = (tmp_path / name).read_bytes()
            damage(tmp_path / name)
            assert finished(tmp_path / "000003", part) is None
            (tmp_path / name).write_bytes(kept)
    assert finished(tmp_path / "000003", part) is not None


def test_a_part_of_other_texts_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    (part,) = parts(DataConfig(source=str(tmp_path / "x.jsonl")))
    encode.encode(part, ByteTokenizer(), tmp_path / "0")
    assert finished(tmp_path / "0", part) is not None
    assert finished(tmp_path / "0", replace(part, stop=part.stop - 1)) is None


def test_parts_outlive_a_process_that_died(corpus: Path, tmp_path: Path) -> None:
    config = DataConfig(source=str(corpus), cache=str(tmp_path / "cache"), tokenizer_workers=1)
    with pytest.raises(DataError, match="a tokenizer process died"):
        prepare(config, Dies(), progress=False)
    (kept,) = (tmp_path / "cache").glob(".*.parts")
    assert len(list(kept.glob("0*.idx"))) == 2


def test_nothing_is_imported_from_the_current_folder(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('sung')")
    command = [sys.executable, str(SCRIPT), "--source", str(corpus), "--output", "out/x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_corpus_that_changes_meanwhile(corpus: Path, tmp_path: Path) -> None:
    """A change that keeps the size is noticed when all parts are there."""

    class Changes(ByteTokenizer):
        def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
            os.utime(corpus, ns=(1, 1))
            return super().encode_batch(texts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_shards, "PART", 2**30)
        config = DataConfig(source=str(corpus), cache=str(tmp_path / "cache"))
        with pytest.raises(DataError, match="changed while it was tokenized"):
            prepare(config, Changes(), progress=False)
        os.utime(corpus)
        with pytest.raises(DataError, match="changed while it was tokenized"):
            prepare_file(config, Changes(), tmp_path / "out" / "x", progress=False)
    assert not list((tmp_path / "out").glob("x*"))


@pytest.mark.parametrize("named", [0, 1])
def test_a_start_after_a_kill_in_the_middle_of_naming(
    tmp_path: Path, named: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.txt").write_text("".join(TEXTS))
    config = DataConfig(source=str(tmp_path / "x.txt"))
    prefix = tmp_path / "out" / "x"
    calls = []

    def killed(source: Path, target: Path) -> None:
        if len(calls) == named:
            raise SystemExit
        calls.append(target)
        rename_noreplace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(file_module, "rename_noreplace", killed)
        with pytest.raises(SystemExit):
            prepare_file(config, ByteTokenizer(), prefix, progress=False)
    made = prepare_file(config, ByteTokenizer(), prefix, progress=False)
    assert made.sizes.documents == 1
    assert TokenFile(prefix).tokens[:].tolist() == [*"".join(TEXTS).encode(), 256]
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["x.bin", "x.idx"]
    with pytest.raises(DataError, match=r"x\.bin exists: remove it"):
        prepare_file(config, ByteTokenizer(), prefix, progress=False)


def test_files_that_came_meanwhile_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("".join(TEXTS))
    prefix = tmp_path / "x"

    class Slow(ByteTokenizer):
        def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
            (tmp_path / "x.idx").write_text("of another")
            return super().encode_batch(texts)

    config = DataConfig(source=str(tmp_path / "x.txt"))
    with pytest.raises(DataError, match=r"x\.idx exists: remove it"):
        prepare_file(config, Slow(), prefix, progress=False)
    assert (tmp_path / "x.idx").read_text() == "of another"


def test_a_maker_that_is_too_late_takes_what_another_made(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    config = DataConfig(source=str(tmp_path / "texts"), cache=str(tmp_path / "cache"))

    class Suspended(ByteTokenizer):
        def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
            other = config.model_copy(update={"cache": str(tmp_path / "other")})
            made = prepare(other, ByteTokenizer(), progress=False)
            made.folder.rename(tmp_path / "cache" / made.digest)
            shutil.rmtree(next((tmp_path / "cache").glob(".*.parts")))
            return super().encode_batch(texts)

    prepared = prepare(config, Suspended(), progress=False)
    assert prepared.meta.train.documents + prepared.meta.validation.documents == len(TEXTS)


def test_long_documents_are_tokenized_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(TEXTS)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("short")
    monkeypatch.setattr(text_chunks, "LONGEST", 100)
    monkeypatch.setattr(encode, "BATCH", 150)
    (part,) = parts(DataConfig(source=str(tmp_path)))
    summary = encode.encode(part, ByteTokenizer(), tmp_path / "0")
    file = TokenFile(tmp_path / "0")
    assert file.tokens[:].tolist() == [*text.encode(), 256, *b"short", 256]
    assert len(file) == 2
    assert summary.text_bytes.tolist() == [len(text.encode()), 5]


def test_default_number_of_processes() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)


def test_one_whose_starter_is_gone_ends_before_it_has_loaded_anything() -> None:
    """Whoever else holds the other end of its socket."""
    here, there = socket.socketpair()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with here, there:
        given = str(gone.pid), str(there.fileno())
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", PROGRAM, *given, *sys.path],
            pass_fds=[there.fileno()],
            capture_output=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert b"megapipe.data.prepare.encode" not in done.stderr
