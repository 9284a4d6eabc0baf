"""A user module with classes of update rules, and with classes that are not rules."""

MODULE = """
from megapipe.optim.rules import Declaration, Elementwise, Rule
from megapipe.optim.rules.elementwise import AdamW


class Good(Elementwise):
    declaration = Declaration(states=("a", "b"), elementwise=True)

    def update(self, part, lr, count): ...


class Whole(Good):
    declaration = Declaration(states=(), elementwise=False, takes_kernel=True)


class Inherits(AdamW):
    pass


class Silent(Elementwise):
    def update(self, part, lr, count): ...


class Nearly(Rule):
    declaration = Declaration(states=("a", "b"), elementwise=True)


class Asks(Good):
    def __init__(self, config, mesh): ...


class NoRule:
    declaration = Good.declaration


def function(config): ...
"""
