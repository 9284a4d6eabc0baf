"""The notes of ranks are compared: every difference is reported, and nothing else."""

from __future__ import annotations

from tests.fake_cuda.ledger import Ledger, compare


def pair() -> tuple[Ledger, Ledger]:
    return Ledger(4), Ledger(5)


def test_equal_notes() -> None:
    ledgers = pair()
    for ledger in ledgers:
        group = ledger.open("a", (4, 5))
        ledger.collective(group, "all_reduce", "all_reduce float32 3")
    assert compare(ledgers) == []


def test_another_collective() -> None:
    ledgers = pair()
    for ledger, what in zip(ledgers, ("float32 3", "float32 4"), strict=True):
        ledger.collective(ledger.open("a", (4, 5)), "all_reduce", what)
    (difference,) = compare(ledgers)
    assert difference.startswith("collectives of ranks (4, 5): number 1 is float32 3 on one side")


def test_one_more() -> None:
    ledgers = pair()
    for times, ledger in enumerate(ledgers):
        group = ledger.open("a", (4, 5))
        for _ in range(times):
            ledger.collective(group, "all_reduce", "x")
    assert "number 1 is nothing on one side and x on the other" in compare(ledgers)[0]


def test_groups_in_another_order() -> None:
    ledgers = pair()
    for turn, ledger in zip((1, -1), ledgers, strict=True):
        groups = [ledger.open(name, (4, 5)) for name in "ab"]
        for group in groups[::turn]:
            ledger.collective(group, "all_reduce", "x")
    (difference,) = compare(ledgers)
    assert difference.startswith("groups that ranks 4 and 5 share: number 1 is in group a#0")


def test_messages() -> None:
    first, second = pair()
    first.open("a", (4, 5)).sent[1] = ["float32 3", "float32 4"]
    second.open("a", (4, 5)).received[0] = ["float32 3"]
    assert compare([first, second]) == [
        "messages from rank 4 to 5: number 2 is float32 4 on one side and nothing on the other"
    ]


def test_groups_of_one_name_are_told_apart() -> None:
    ledgers = pair()
    for ledger in ledgers:
        for what in ("x", "y"):
            ledger.collective(ledger.open("a", (4, 5)), "all_reduce", what)
    assert [list(ledger.groups) for ledger in ledgers] == [["a#0", "a#1"]] * 2
    assert compare(ledgers) == []
