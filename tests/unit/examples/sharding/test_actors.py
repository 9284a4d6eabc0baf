"""Actors with credits: registers are bounded, and nothing else is lost or changed."""

from __future__ import annotations

import random

import pytest

from examples.sharding.actors import Actor, Runtime
from megapipe.errors import ConfigError


def chain(stages: int, registers: int, seconds: float = 1.0) -> list[Actor]:
    first = Actor("0", float, registers=registers)
    return [
        first,
        *(
            Actor(str(i), lambda x: 2 * x + 1, (str(i - 1),), registers, seconds)
            for i in range(1, stages)
        ),
    ]


@pytest.mark.parametrize("registers", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 4])
def test_two_registers_are_enough_for_a_full_pipeline(stages: int, registers: int) -> None:
    """With one, a stage waits until the next one has ended with its last result."""
    done = Runtime(chain(stages, registers)).run(6)
    assert done.results == [2 ** (stages - 1) * (i + 1) - 1 for i in range(6)]
    period = 2 if registers == 1 else 1
    assert done.seconds == stages + 5 * period
    assert max(done.registers.values()) <= registers


def test_a_slow_consumer_slows_its_producer_down() -> None:
    """Without credits the source would hold nine results at the end."""
    done = Runtime([Actor("0", float, registers=3), Actor("1", float, ("0",), seconds=10.0)]).run(9)
    assert done.seconds == 91.0
    assert done.registers == {"0": 3, "1": 1}


@pytest.mark.parametrize("seed", range(20))
def test_registers_are_never_exceeded_in_random_graphs(seed: int) -> None:
    numbers = random.Random(seed)
    count = numbers.randint(2, 7)
    live: dict[str, int] = dict.fromkeys(map(str, range(count)), 0)
    limits = {name: numbers.randint(1, 3) for name in live}
    actors = []
    for index, name in enumerate(live):
        before = [str(each) for each in range(index)]
        inputs = tuple(numbers.sample(before, numbers.randint(1, min(2, index)))) if index else ()
        if index == count - 1:  # joins what nobody reads
            read = {each for actor in actors for each in actor.inputs}
            inputs = tuple(each for each in before if each not in read) or inputs
        seconds = float(numbers.randint(1, 4))
        actors.append(Actor(name, lambda *args: sum(args) + 1, inputs, limits[name], seconds))
    done = Runtime(actors).run(8)
    assert len(done.results) == 8
    assert all(used <= limits[name] for name, used in done.registers.items())

    def value(name: str, number: int) -> int:
        inputs = actors[int(name)].inputs
        return sum(value(each, number) for each in inputs) + 1 if inputs else number + 1

    assert done.results == [value(str(count - 1), number) for number in range(8)]


@pytest.mark.parametrize(
    ("actor", "message"),
    [
        (Actor("a", float, registers=0), "actor a: 0 registers"),
        (Actor("a", float, ("b",)), "actor a: no earlier actor is called 'b'"),
    ],
)
def test_actors_that_cannot_be(actor: Actor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Runtime([actor])
