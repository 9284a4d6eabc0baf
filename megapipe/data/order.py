"""The order of samples as a pure function: no permutation is stored, no history is needed.

A balanced Feistel network is a permutation of 0 .. 2^(2k)-1 for any round function, and takes the
same few operations at every index. If 2^(2k) exceeds n, an index that lands outside 0 .. n-1 goes
through the permutation again until it lands inside, which gives a permutation of 0 .. n-1 ("cycle
walking": Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002). The round keys are
a BLAKE2b digest of (seed, epoch); the round function is the SplitMix64 finaliser (Steele, Lea and
Flood, OOPSLA 2014).
"""

import struct
from hashlib import blake2b
from typing import Any, overload

import numpy as np
import numpy.typing as npt

_MASK64 = 2**64 - 1


@overload
def splitmix64(value: int) -> int: ...
@overload
def splitmix64(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]: ...
def splitmix64(value: Any) -> Any:
    """Map an integer from 0 to 2^64 - 1, or each of an array, by a permutation of these integers;
    every output bit depends on all input bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def order(seed: int, n: int, global_index: int) -> int:
    """Return the sample, 0 .. n-1, at position `global_index` of consecutive shuffled epochs.

    Every epoch visits each sample once, in an order that depends on the seed and on the epoch. Time
    does not depend on the index (at most 4 passes of the Feistel network on average), and memory
    does not depend on n.
    """
    epoch, index = divmod(global_index, n)
    keys = struct.unpack("<8Q", blake2b(struct.pack("<QQ", seed, epoch), digest_size=64).digest())
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            left, right = right, left ^ (splitmix64(right ^ key) & mask)
        index = left << half | right
        if index < n:
            return index
