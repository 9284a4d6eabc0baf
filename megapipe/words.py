"""Numbers in sentences."""


def counted(number: int, noun: str) -> str:
    """The number and its noun: 1 step, 1,000 steps, 8 processes."""
    return f"{number:,} {plural(noun, number)}"


def plural(noun: str, number: int) -> str:
    """The noun as it stands beside the number: with s, or es after s and ch, unless that is 1."""
    if number == 1:
        return noun
    return f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
