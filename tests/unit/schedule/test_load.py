"""Schedules by name, from a user's function and from a file."""

import sys
from fractions import Fraction

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build
from megapipe.schedule.load import load
from megapipe.schedule.text import to_csv

MODULE = """
from megapipe.errors import ScheduleError
from megapipe.schedule.generators import build


def plain(ranks, microbatches):
    return build("1f1b", ranks=ranks, microbatches=microbatches)


def chunked(microbatches, ranks, chunks=2, microbatch_group_size=None):
    return build(
        "interleaved_1f1b",
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        microbatch_group_size=microbatch_group_size,
    )


def anything(**given):
    seen.append(given)
    return plain(given["ranks"], given["microbatches"])


def by_cost(ranks, microbatches, cost=None):
    seen.append(cost)
    return plain(ranks, microbatches)


def fixed():
    return plain(2, 4)


def fails(ranks, microbatches):
    raise RuntimeError("two\\n  lines")


def refuses(ranks, microbatches):
    raise ScheduleError("ranks must be even")


def asks(ranks, depth):
    return plain(ranks, depth)


def needs_chunks(ranks, microbatches, chunks):
    return plain(ranks, microbatches)


def positional(ranks, /, microbatches):
    return plain(ranks, microbatches)


def no_schedule(ranks, microbatches):
    return "1f1b"


seen = []
number = 3
"""


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Make a directory with the user's module the current one."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "lacking.py").write_text("import no_such_thing_at_all\n")
    (tmp_path / "failing.py").write_text("\n1 / 0\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    assert sys.path == path
    for name in ("mine", "broken", "lacking", "failing"):
        sys.modules.pop(name, None)


def test_a_registered_name():
    assert load("1f1b", ranks=3, microbatches=5) == build("1f1b", ranks=3, microbatches=5)
    ours = load("interleaved_1f1b", ranks=2, microbatches=4, chunks=3, microbatch_group_size=None)
    assert ours == build("interleaved_1f1b", ranks=2, microbatches=4, chunks=3)


def test_a_function(user):
    assert load("mine:plain", ranks=3, microbatches=5) == build("1f1b", ranks=3, microbatches=5)


def test_a_function_is_called_with_what_it_takes(user):
    schedule = load(
        "mine:chunked", ranks=2, microbatches=6, chunks=3, microbatch_group_size=2, cost=Cost()
    )
    assert schedule == build(
        "interleaved_1f1b", ranks=2, microbatches=6, chunks=3, microbatch_group_size=2
    )
    load("mine:anything", ranks=2, microbatches=6, chunks=1, slices=None, activation_limit=4)
    load("mine:by_cost", ranks=2, microbatches=6, cost=Cost(F=3))
    assert sys.modules["mine"].seen == [
        {"ranks": 2, "microbatches": 6, "chunks": 1, "activation_limit": 4},
        Cost(F=3),
    ]


def test_one_chunk_and_one_slice_are_what_a_plain_schedule_has(user):
    assert load("mine:plain", ranks=2, microbatches=6, chunks=1, slices=1).placement.stages == 2


def test_a_function_in_a_package(user):
    (user / "mypackage").mkdir()
    (user / "mypackage" / "orders.py").write_text(MODULE)
    assert load("mypackage.orders:fixed", ranks=2, microbatches=4).microbatches == 4
    del sys.modules["mypackage.orders"], sys.modules["mypackage"]


def test_a_file(user):
    schedule = build("zb_h1", ranks=3, microbatches=4)
    (user / "own.csv").write_text(to_csv(schedule))
    read = load("own.csv", ranks=3, microbatches=4, chunks=1, cost=Cost())
    assert (read.name, read.ops, read.placement) == ("own.csv", schedule.ops, schedule.placement)
    assert load(str(user / "own.csv"), ranks=3, microbatches=4).ops == schedule.ops


def test_a_file_with_parts_of_micro_batches(user):
    (user / "halves.csv").write_text("# sizes 1/2 1/2 1\n0F0,0F1,0F2,0B0,0B1,0B2\n")
    assert load("halves.csv", ranks=1, microbatches=2).microbatches == 3
    with pytest.raises(ScheduleError, match="it has 2 micro-batches, not the 3 asked for"):
        load("halves.csv", ranks=1, microbatches=3)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (
            "1f1p",
            {},
            r"schedule '1f1p' is unknown; did you mean '1f1b'\?.*; a schedule of your own is mod",
        ),
        ("1f1b", {"chunks": 2}, r"schedule 1f1b: chunks must be 1, not 2"),
        (
            "1f1b",
            {"microbatch_group_size": 2},
            r"schedule 1f1b: microbatch_group_size must not be given, not 2",
        ),
        (":plain", {}, r"schedule :plain: write module:name, as in my_module:build"),
        ("mine:", {}, r"schedule mine:: write module:name"),
        ("nowhere:f", {}, r"schedule nowhere:f: there is no module 'nowhere' in /.* or among the"),
        ("mine.sub:f", {}, r"schedule mine.sub:f: there is no module 'mine.sub' in /"),
        ("mine:absent", {}, r"schedule mine:absent: module 'mine' has no function 'absent'"),
        ("mine:number", {}, r"schedule mine:number: module 'mine' has no function 'number'"),
        ("broken:f", {}, r"schedule broken:f: SyntaxError: .*\(broken.py, line 1\)$"),
        ("lacking:f", {}, r"schedule lacking:f: .*'no_such_thing_at_all' \(lacking.py, line 1\)$"),
        ("failing:f", {}, r"schedule failing:f: ZeroDivisionError: .* \(failing.py, line 2\)$"),
        (
            "mine:fails",
            {},
            r"^schedule mine:fails: RuntimeError: two lines \(mine.py, line \d+\)$",
        ),
        ("mine:refuses", {}, r"^schedule mine:refuses: ranks must be even$"),
        (
            "mine:asks",
            {},
            r"schedule mine:asks: its parameter depth needs a default; it can be giv",
        ),
        ("mine:needs_chunks", {}, r"schedule mine:needs_chunks: chunks must be given"),
        ("mine:positional", {}, r"schedule mine:positional: TypeError: .*positional-only"),
        ("builtins:dict", {}, r"schedule builtins:dict: its parameters cannot be read"),
        ("mine:no_schedule", {}, r"schedule mine:no_schedule: it returned str; return a megapipe"),
        (
            "mine:plain",
            {"microbatch_group_size": 2},
            r"schedule mine:plain: microbatch_group_size must not be given, not 2",
        ),
        (
            "mine:plain",
            {"chimera_pairs": 2},
            r"schedule mine:plain: chimera_pairs must not be given, not 2",
        ),
        (
            "mine:plain",
            {"ranks_per_stage": [2]},
            r"mine:plain: ranks_per_stage must not be given, not \[2\]",
        ),
        ("mine:plain", {"chunks": 2}, r"mine:plain: it has 2 stages, not the 4 asked for"),
        ("mine:plain", {"slices": 2}, r"mine:plain: it has 1 slices, not the 2 asked for"),
        ("mine:fixed", {"ranks": 3}, r"mine:fixed: it has 2 ranks, not the 3 asked for"),
        ("mine:fixed", {"microbatches": 5}, r"it has 4 micro-batches, not the 5 asked for"),
        ("absent.csv", {}, r"schedule absent.csv: No such file or directory"),
        ("folder.csv", {}, r"schedule folder.csv: Is a directory"),
        ("binary.csv", {}, r"schedule binary.csv: it is not a text file"),
        ("wrong.csv", {}, r"schedule wrong.csv: line 1, cell 2: '0X0' is not an operation"),
        (
            "own.csv",
            {"microbatch_group_size": 1},
            r"schedule own.csv: microbatch_group_size must not be given, not 1",
        ),
        ("own.csv", {"ranks": 3}, r"schedule own.csv: it has 2 ranks, not the 3 asked for"),
    ],
)
def test_what_cannot_be_loaded_is_one_clear_line(user, spec, options, message):
    (user / "folder.csv").mkdir()
    (user / "binary.csv").write_bytes(b"\xff\xfe0F0")
    (user / "wrong.csv").write_text("0F0,0X0\n")
    (user / "own.csv").write_text(to_csv(build("1f1b", ranks=2, microbatches=4)))
    with pytest.raises(ScheduleError, match=message) as caught:
        load(spec, **{"ranks": 2, "microbatches": 4, **options})
    assert "\n" not in str(caught.value)


def test_a_mistaken_call_is_a_bug():
    with pytest.raises(TypeError, match="build has no option 'chunk'"):
        load("1f1b", ranks=2, microbatches=2, chunk=2)


@pytest.mark.parametrize("sizes", ["1/2 1 1/2", "2/3 1/2 5/6", "1 2/3 1/3 1/2 1 1/2"])
def test_parts_that_run_over_a_whole_micro_batch(tmp_path, sizes):
    shares = [Fraction(size) for size in sizes.split()]
    ops = [f"0F{i},0B{i}" for i in range(len(shares))]
    path = tmp_path / "parts.csv"
    path.write_text(f"# sizes {sizes}\n{','.join(ops)}\n")
    with pytest.raises(ScheduleError, match="sizes of consecutive micro-batches must add up to 1"):
        load(str(path), ranks=1, microbatches=int(sum(shares)))


def test_a_schedule_without_a_backward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lazy.py").write_text(
        "from megapipe.schedule.generators import forward_only\n"
        "from megapipe.schedule.placement import loop\n"
        "def make(ranks, microbatches): return forward_only(loop(ranks), microbatches)\n"
    )
    with pytest.raises(ScheduleError, match="lazy:make: it has no backward"):
        load("lazy:make", ranks=2, microbatches=2)


def test_cells_that_are_too_long(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text("0F0," + "9" * 200_000)
    with pytest.raises(ScheduleError, match="not a table of cells"):
        load(str(path), ranks=1, microbatches=1)
