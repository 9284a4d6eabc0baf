"""The length of equal shards. This module needs no torch, so that the plan can use it."""


def shard_length(values: int, ranks: int) -> int:
    """Return the length of each of `ranks` shards of `values` elements; the last may be padded."""
    return -(-values // ranks)
