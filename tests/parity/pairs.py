"""Few choices of a value for each dimension that between them hold every pair of values."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Choice = dict[str, Any]
"""A value for each dimension."""
DRAWS = 300
"""Choices of which the best is taken."""


def as_drawn(rng: random.Random, choice: Choice, given: Mapping[str, Any]) -> Choice:
    """A choice as it was drawn."""
    return choice


def pairs_of(choice: Choice) -> set[Any]:
    """Every two dimensions with their values."""
    return set(itertools.combinations(choice.items(), 2))


@dataclass(frozen=True)
class Pairs:
    """Dimensions with their values, the plain one of each first."""

    dimensions: Mapping[str, Sequence[Any]]
    excluded: Callable[[Choice], bool]
    """Whether values exclude each other."""
    plain_share: Mapping[str, float]
    """How often a drawn value is the plain one, where values are no equals."""
    joint: Mapping[str, tuple[str, ...]]
    """Dimensions that give several fields of a case their values."""
    fit: Callable[[random.Random, Choice, Mapping[str, Any]], Choice] = as_drawn
    """Makes what was drawn beside given values fit them better."""
    impossible: set[Any] = field(default_factory=set)
    """Values that have no completion, as far as some was looked for."""

    def fields(self, choice: Choice) -> dict[str, Any]:
        """The values of a case's fields."""
        values = {name: value for name, value in choice.items() if name not in self.joint}
        for name, fields in self.joint.items():
            values |= zip(fields, choice[name], strict=True)
        return values

    def draw(self, rng: random.Random, given: Mapping[str, Any]) -> Choice:
        """A value for each dimension, some of them `given`."""
        choice, random = {}, rng.random  # rng.choice takes three times as long
        for name, values in self.dimensions.items():
            plain = random() < self.plain_share.get(name, 0)
            choice[name] = values[0 if plain else int(random() * len(values))]
        return self.fit(rng, choice | given, given)

    def completion(self, values: Mapping[str, Any]) -> Choice | None:
        """A choice with these values, else plain but for two dimensions at most, if any."""
        if (known := frozenset(values.items())) in self.impossible:
            return None
        plain = {name: first for name, (first, *_) in self.dimensions.items()} | values
        free = [name for name in self.dimensions if name not in values]
        for a, b in itertools.combinations(free, 2):
            for x, y in itertools.product(self.dimensions[a], self.dimensions[b]):
                choice = plain | {a: x, b: y}
                if not self.excluded(choice):
                    return choice
        self.impossible.add(known)
        return None

    def all(self) -> list[Any]:
        """Every pair of values of two dimensions, possible or not."""
        return [
            ((a, x), (b, y))
            for a, b in itertools.combinations(self.dimensions, 2)
            for x, y in itertools.product(self.dimensions[a], self.dimensions[b])
        ]

    def covering(self, rng: random.Random) -> list[Choice]:
        """Choices that between them hold every possible pair of values of two dimensions.

        Greedy: of some random choices that contain a missing pair, take the one with most of them.
        """
        missing = dict.fromkeys(self.all())  # in order, so that the result is always the same
        choices: list[Choice] = []
        while missing:
            pair = next(iter(missing))
            drawn = (self.draw(rng, dict(pair)) for _ in range(DRAWS))
            legal = [choice for choice in drawn if not self.excluded(choice)]
            if not legal and (last := self.completion(dict(pair))) is not None:
                legal = [last]
            if not legal:
                del missing[pair]
                continue
            best = max(legal, key=lambda choice: len(pairs_of(choice) & missing.keys()))
            for held in pairs_of(best):
                missing.pop(held, None)
            choices.append(best)
        return self.plainer(choices)

    def varied(self, rng: random.Random, given: Mapping[str, Any]) -> Choice | None:
        """A random choice with these values, if there is any: from a plain one on, each dimension
        takes a random value where the others allow it."""
        choice = self.completion(given)
        names = [name for name in self.dimensions if name not in given]
        for name in (*rng.sample(names, len(names)), *rng.sample(names, len(names))):
            if choice is not None and rng.random() >= self.plain_share.get(name, 0):
                other = choice | {name: rng.choice(self.dimensions[name])}
                choice = choice if self.excluded(other) else other
        return choice

    def plainer(self, choices: list[Choice]) -> list[Choice]:
        """The same pairs, with the plain value of each dimension that is to be plain more often
        wherever no pair is lost."""
        held = Counter(pair for choice in choices for pair in pairs_of(choice))
        for choice, name in itertools.product(choices, self.plain_share):
            if choice[name] == (plain := self.dimensions[name][0]):
                continue
            other = choice | {name: plain}
            lost, new = pairs_of(choice) - pairs_of(other), pairs_of(other) - pairs_of(choice)
            if not self.excluded(other) and all(held[pair] > 1 for pair in lost):
                held.subtract(lost)
                held.update(new)
                choice.update(other)
        return choices

    def check_held(self, choices: Sequence[Choice]) -> None:
        """Every possible pair is held, and every value."""
        held = set().union(*map(pairs_of, choices))
        for pair in self.all():
            assert pair in held or self.completion(dict(pair)) is None, pair
        values = set(itertools.chain.from_iterable(held))
        for name, of in self.dimensions.items():
            assert [v for v in of if (name, v) not in values] == [], name

    def check_fields(self, fields: set[str], elsewhere: Mapping[str, str]) -> None:
        """Every field of a case is a dimension, or varies elsewhere."""
        inside = set(self.dimensions) - set(self.joint)
        inside |= set(itertools.chain.from_iterable(self.joint.values()))
        assert inside | set(elsewhere) == fields
        assert not inside & set(elsewhere)
