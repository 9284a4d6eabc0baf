"""OneFlow's runtime (2110.15032): actors with a fixed number of registers, and credits for them.

An actor acts when each of its inputs has a message and one of its own registers is free. A register
is free again when all consumers have acted on it and said so. So memory is bounded by what is
declared, and a slow consumer slows its producer down; nothing else controls the flow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple

from megapipe.errors import ConfigError


@dataclass(frozen=True)
class Actor:
    """An operation with its registers."""

    name: str
    act: Callable[..., Any]
    """Function of a message of each input. A source is a function of the message's number."""
    inputs: tuple[str, ...] = ()
    """Names of the actors whose messages it takes."""
    registers: int = 1
    """Number of its results that can exist at once."""
    seconds: float = 1.0


@dataclass
class _State:
    """What an actor has at a moment."""

    free: int
    waiting: dict[str, deque[tuple[int, Any]]] = field(default_factory=dict)
    """Messages by producer, with their numbers."""
    busy: bool = False
    acted: int = 0
    used: int = 0
    """Largest number of registers in use at once."""


class Outcome(NamedTuple):
    """What actors did."""

    results: list[Any]
    """Results of the last actor, in order."""
    seconds: float
    registers: dict[str, int]
    """Largest number of registers of each actor in use at once."""


class Runtime:
    """Actors that send each other messages, on a clock of their own.

    Raises:
        ConfigError: an actor without a register, or an input that no earlier actor makes.
    """

    def __init__(self, actors: Sequence[Actor]) -> None:
        known: set[str] = set()
        for actor in actors:
            if actor.registers < 1:
                raise ConfigError(
                    f"actor {actor.name}: {actor.registers} registers; 1 is the least"
                )
            for name in actor.inputs:
                if name not in known:
                    raise ConfigError(f"actor {actor.name}: no earlier actor is called {name!r}")
            known.add(actor.name)
        self.actors = {actor.name: actor for actor in actors}
        self.consumers = {
            name: [other.name for other in actors if name in other.inputs] for name in self.actors
        }
        self.states = {
            name: _State(actor.registers, {source: deque() for source in actor.inputs})
            for name, actor in self.actors.items()
        }
        self.unread: dict[tuple[str, int], int] = {}
        """Number of consumers that still need a register, by producer and number."""
        self.results: list[Any] = []

    def run(self, messages: int) -> Outcome:
        """Let sources make `messages` messages each, and run until all actors have acted on
        them."""
        now, started = 0.0, 0
        events: list[tuple[float, int, str, tuple[int, Any], tuple[Any, ...]]] = []
        while True:
            for name, actor in self.actors.items():
                if self._ready(name, messages):
                    taken = self._start(name)
                    number = self.states[name].acted
                    args = tuple(value for _, value in taken) if actor.inputs else (number,)
                    result = number, actor.act(*args)
                    reads = tuple(zip(actor.inputs, (n for n, _ in taken), strict=True))
                    started += 1
                    heappush(events, (now + actor.seconds, started, name, result, reads))
            if not events:
                break
            now, _, name, result, reads = heappop(events)
            self._end(name, result, reads)
        return Outcome(self.results, now, {name: at.used for name, at in self.states.items()})

    def _ready(self, name: str, messages: int) -> bool:
        state = self.states[name]
        return (
            not state.busy
            and state.free > 0
            and state.acted < messages
            and all(state.waiting.values())
        )

    def _start(self, name: str) -> list[tuple[int, Any]]:
        """Take a register and a message of each input."""
        state = self.states[name]
        state.busy = True
        state.free -= 1
        state.used = max(state.used, self.actors[name].registers - state.free)
        return [queue.popleft() for queue in state.waiting.values()]

    def _end(self, name: str, result: tuple[int, Any], reads: tuple[tuple[str, int], ...]) -> None:
        """Send the result to all consumers, and give the credits of its inputs back."""
        state = self.states[name]
        state.busy = False
        state.acted += 1
        for consumer in self.consumers[name]:
            self.states[consumer].waiting[name].append(result)
        self.unread[name, result[0]] = len(self.consumers[name])
        if not self.consumers[name]:
            self.results.append(result[1])
            state.free += 1
        for source in reads:
            self.unread[source] -= 1
            self.states[source[0]].free += self.unread[source] == 0
