"""Numbers in sentences."""


def counted(number: int, noun: str) -> str:
    """The number and its noun, whose plural is regular: 1 step, 1,000 steps."""
    return f"{number:,} {plural(noun, number)}"


def plural(noun: str, number: int) -> str:
    """The noun as it stands beside the number: for 1 as it is, for others with an s."""
    return noun if number == 1 else f"{noun}s"
