"""Division of a token file's sequences into training, validation and test."""

import itertools
import re

import numpy as np

from megapipe.errors import ConfigError

_NUMBER = r"\s*(\d+\.?\d*|\.\d+)\s*"
_SPLIT = re.compile(rf"{_NUMBER}(,{_NUMBER}){{0,2}}")


def split_ranges(split: str, sequences: int) -> tuple[range, range, range]:
    """Return the ranges of sequences for training, validation and test, in the order of the file.

    Args:
        split: up to three weights, for example ``"969,30,1"``; missing ones are 0.
        sequences: number of sequences of the token file.

    Returns:
        Three consecutive ranges, rounded as in Megatron-LM; a range of weight 0 is empty.

    Raises:
        ConfigError: `split` has another form, or all weights are 0.
    """
    if _SPLIT.fullmatch(split) is None:
        raise ConfigError(
            f"data.split={split}: expected one to three weights of sequences, such as 969,30,1"
        )
    weights = np.array([float(weight) for weight in split.split(",")])
    total = weights.sum()
    if not 0 < total < np.inf:
        raise ConfigError(
            f"data.split={split}: the sum of the weights is {total:g}: expected one above 0, as in "
            "969,30,1"
        )
    shares = (weights / total).tolist()
    ends = itertools.accumulate(shares + [0.0] * (3 - len(shares)))
    cuts = [0, *(round(end * float(sequences)) for end in ends)]
    train, validation, test = itertools.starmap(range, itertools.pairwise(cuts))
    return train, validation, test
