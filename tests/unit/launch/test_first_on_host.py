"""What one process of a host does before the others, with threads for processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from torch.distributed import HashStore, Store

from megapipe.errors import ConfigError, DataError, LaunchError, MegapipeError
from megapipe.launch import rendezvous

N = 4


class Shelf:
    """Something to fetch, and to find once it is there."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.fetched = 0
        self.found = 0

    def take(self) -> str:
        if self.fetched:
            self.found += 1
            return "book"
        time.sleep(0.2)
        if self.error is not None:
            raise self.error
        self.fetched += 1
        return "book"


def call_all(shelf: Shelf, store: Store, timeout_s: float = 20.0) -> list[object]:
    return of_all(lambda rank: rendezvous.first_on_host(store, rank, "book", shelf.take, timeout_s))


def of_all(act: Callable[[int], object]) -> list[object]:
    """Collect what each rank returns or raises."""
    results: list[object] = []

    def call(rank: int) -> None:
        try:
            results.append(act(rank))
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(N)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == N
    return results


def test_one_fetches_and_the_others_find() -> None:
    shelf = Shelf()
    assert call_all(shelf, HashStore()) == ["book"] * N
    assert (shelf.fetched, shelf.found) == (1, N - 1)


def test_every_host_has_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    store, shelves = HashStore(), []
    for host in ("a", "b"):
        monkeypatch.setattr(rendezvous.socket, "gethostname", lambda host=host: host)
        shelves.append(Shelf())
        call_all(shelves[-1], store)
    assert [(shelf.fetched, shelf.found) for shelf in shelves] == [(1, N - 1)] * 2


@pytest.mark.parametrize("error", [DataError("no such book"), LaunchError("lost")])
def test_an_error_is_that_of_all_or_lets_the_others_try(error: MegapipeError) -> None:
    results = call_all(Shelf(error), HashStore())
    assert [str(each) for each in results] == [str(error)] * N
    assert {type(each) for each in results} == {type(error)}


def test_a_first_that_never_comes_back_is_one_line() -> None:
    store = HashStore()
    store.set(f"book on {rendezvous.socket.gethostname()}", "3")
    with pytest.raises(
        LaunchError,
        match=r"^book: rank 3, the first on .*, did not finish it within parallel.timeout_s=1",
    ):
        rendezvous.first_on_host(store, 1, "book", lambda: None, 1.0)


@pytest.mark.parametrize(
    ("error", "of_rank_0", "of_others"),
    [
        (None, "book", "book"),
        (ConfigError("no such book"), "no such book", "no such book"),
        (ValueError("lost"), "lost", "book: rank 0 did not finish it within parallel.timeout_s=1"),
    ],
)
def test_all_get_what_rank_0_makes(error: Exception | None, of_rank_0: str, of_others: str) -> None:
    """They get its error, if that is of the configuration; who waits for others hears of rank 0."""
    store, shelf = HashStore(), Shelf(error)
    found = of_all(lambda rank: rendezvous.of_rank_0(store, rank, 1.0, "book", shelf.take))
    assert sorted(map(str, found)) == sorted([of_rank_0] + [of_others] * (N - 1))
    assert (shelf.fetched, shelf.found) == (error is None, 0)
