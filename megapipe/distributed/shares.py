"""Equal shares of an array; the plan counts them without torch."""


def shard_length(values: int, ranks: int) -> int:
    """Length of the equal shares of an array, the last of which may be padded."""
    return -(-values // ranks)
