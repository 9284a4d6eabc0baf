"""Few choices of a value for each dimension that together contain every pair of values."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Choice = dict[str, Any]
"""A value for each dimension."""
Pair = tuple[tuple[str, Any], tuple[str, Any]]
"""Two dimensions with a value for each."""
DRAWS = 50
"""Number of choices that are drawn to take the best one."""
HOPELESS = 6
"""Draws without a legal choice after which a pair is searched value by value."""
REPAIRS = 12
"""Number of repairs after which a drawn choice is given up."""
CHANGED = 3
"""Number of values of a completion that may differ from the plain ones."""


def pairs_of(choice: Choice) -> set[Pair]:
    """Return every two dimensions with their values."""
    return set(itertools.combinations(choice.items(), 2))


@dataclass(frozen=True)
class Pairs:
    """Dimensions with their values, the plain one of each first."""

    dimensions: Mapping[str, Sequence[Any]]
    blame: Callable[[Choice], frozenset[str]]
    """Returns dimensions, some of which have to change; none if the choice is legal."""
    plain_share: Mapping[str, float]
    """How often a drawn value is the plain one, if values are not drawn evenly."""
    joint: Mapping[str, Sequence[str]]
    """Dimensions that set several fields of a case."""

    @property
    def plain(self) -> Choice:
        return {name: values[0] for name, values in self.dimensions.items()}

    def fields(self, choice: Choice) -> dict[str, Any]:
        """Return the values of a case's fields."""
        values = {name: value for name, value in choice.items() if name not in self.joint}
        for name, fields in self.joint.items():
            values |= zip(fields, choice[name], strict=True)
        return values

    def draw(self, rng: random.Random, given: Mapping[str, Any]) -> Choice | None:
        """Draw a legal choice with `given` values: a random one, in which illegal values are drawn
        again. None if that does not help."""
        choice = {name: self._value(rng, name) for name in self.dimensions} | given
        for _ in range(REPAIRS):
            blamed = self.blame(choice)
            if not blamed:
                return choice
            if not (free := sorted(self.dimensions.keys() & blamed - given.keys())):
                return None
            for name in rng.sample(free, rng.randint(1, len(free))):
                plain = rng.random() < 0.5
                choice[name] = self.dimensions[name][0] if plain else self._value(rng, name)
        return None

    def _value(self, rng: random.Random, name: str) -> Any:
        values = self.dimensions[name]
        if rng.random() < self.plain_share.get(name, 0):
            return values[0]
        return values[int(rng.random() * len(values))]  # rng.choice takes three times as long

    def completion(self, values: Mapping[str, Any]) -> Choice | None:
        """Return a legal choice with these values, and few others that are not plain, if there is
        one. It changes the values that make a choice illegal, one after the other."""
        tried: set[frozenset[Any]] = set()
        begin = dict(values)
        level = [begin]
        for changed in range(CHANGED + 1):
            following = []
            for given in level:
                choice = self.plain | given
                blamed = self.blame(choice)
                if not blamed:
                    return choice
                free = self.dimensions.keys() & blamed - given.keys()
                for name in sorted(free) if changed < CHANGED else ():
                    for value in self.dimensions[name][1:]:
                        more = {**given, name: value}
                        if (known := frozenset(more.items())) not in tried:
                            tried.add(known)
                            following.append(more)
            level = following
        return None

    def all(self) -> Iterator[Pair]:
        """Yield every pair of values of two dimensions, possible or not."""
        for a, b in itertools.combinations(self.dimensions, 2):
            for x, y in itertools.product(self.dimensions[a], self.dimensions[b]):
                yield (a, x), (b, y)

    def covering(
        self,
        rng: random.Random,
        begin: Sequence[Choice] = (),
        known: Sequence[Pair] = (),
        told: Callable[[int, int], None] = lambda choices, missing: None,
    ) -> tuple[list[Choice], list[Pair]]:
        """Return choices that together contain every possible pair, and the impossible pairs.

        Greedy: of some random choices that contain a missing pair, take the one with most of them.
        It starts with the choices `begin`; the pairs `known` are impossible. `told` is called with
        the numbers of choices made and of pairs missing.
        """
        choices = [choice for choice in begin if not self.blame(choice)]
        held: set[Pair] = set().union(*map(pairs_of, choices))
        # in order, so that the result is always the same
        impossible = [pair for pair in known if pair not in held]
        missing = dict.fromkeys(pair for pair in self.all() if pair not in held)
        for pair in impossible:
            missing.pop(pair, None)
        while missing:
            pair = next(iter(missing))
            legal: list[Choice] = []
            for number in range(DRAWS):
                if (choice := self.draw(rng, dict(pair))) is not None:
                    legal.append(choice)
                elif not legal and number >= HOPELESS:
                    break
            if not legal and (last := self.completion(dict(pair))) is not None:
                legal = [last]
            if not legal:
                impossible.append(pair)
                del missing[pair]
                continue
            best = max(legal, key=lambda choice: len(pairs_of(choice) & missing.keys()))
            for each in pairs_of(best):
                missing.pop(each, None)
            choices.append(best)
            told(len(choices), len(missing))
        return self.plainer(choices), impossible

    def plainer(self, choices: list[Choice]) -> list[Choice]:
        """Make dimensions plain that should be plain more often, wherever no pair is lost. Remove
        choices without a pair of their own."""
        held = Counter(pair for choice in choices for pair in pairs_of(choice))
        for choice, name in itertools.product(choices, self.plain_share):
            if choice[name] == (plain := self.dimensions[name][0]):
                continue
            other = choice | {name: plain}
            lost, new = pairs_of(choice) - pairs_of(other), pairs_of(other) - pairs_of(choice)
            if all(held[pair] > 1 for pair in lost) and not self.blame(other):
                held.subtract(lost)
                held.update(new)
                choice.update(other)
        needed = []
        for choice in choices:
            if any(held[pair] == 1 for pair in pairs_of(choice)):
                needed.append(choice)
            else:
                held.subtract(pairs_of(choice))
        return needed

    def check_held(self, choices: Sequence[Choice], impossible: Collection[Pair]) -> None:
        """Assert that each pair is in a choice or impossible, and each value in a choice."""
        held: set[Pair] = set().union(*map(pairs_of, choices))
        without = set(impossible)
        both = held & without
        assert not both, f"{min(both, key=str)} is held and said to be impossible"
        lacking = [pair for pair in self.all() if pair not in held and pair not in without]
        assert not lacking, f"{len(lacking)} pairs are in no case, the first is {lacking[0]}"
        values = set(itertools.chain.from_iterable(held))
        for name, of in self.dimensions.items():
            assert [v for v in of if (name, v) not in values] == [], name
