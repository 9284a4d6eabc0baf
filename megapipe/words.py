"""Numbers in sentences."""

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """The number and its noun: 1 step, 1,000 steps, 8 processes."""
    return f"{number:,} {plural(noun, number)}"


def plural(noun: str, number: int) -> str:
    """The noun as it stands beside the number: with s, or es after s and ch, unless that is 1."""
    if number == 1:
        return noun
    return f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"


def choices(name: str, size: int, near: int) -> str:
    """The values of `name` that divide `size`, the eight nearest to `near`."""
    divisors = [d for d in range(1, min(size, 4096) + 1) if size % d == 0]
    return f"{name} could be {either(sorted(sorted(divisors, key=lambda d: abs(d - near))[:8]))}"


def multiples(value: int, factor: int) -> str:
    """The multiples of `factor` next to `value`."""
    below = value // factor * factor
    return f"expected a multiple, such as {either([m for m in (below, below + factor) if m])}"


def either(values: Sequence[int | str]) -> str:
    """The values in words: 1, 2 or 4."""
    *head, last = map(str, values)
    return f"{', '.join(head)} or {last}" if head else last
