"""Which part of a global tensor a rank holds."""

from __future__ import annotations

import pytest
import torch

from megapipe.distributed.mesh import Axis
from megapipe.layers.parameter import Sharding, new_parameter, spec_of
from megapipe.layers.specs import ParameterSpec


def sharding(size: int, index: int, sequence_parallel: bool = False) -> Sharding:
    tp = Axis(size=size, index=index, ranks=tuple(range(size)), group=None)
    return Sharding(tp, sequence_parallel, torch.float32)


@pytest.mark.parametrize("split_dim", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_regions_of_all_ranks_make_up_the_tensor(size: int, split_dim: int) -> None:
    full = torch.zeros(8, 12)
    for index in range(size):
        whole = ParameterSpec(name="w", shape=(8, 12), split_dim=split_dim, std=0.1)
        parameter = new_parameter(sharding(size, index), whole)
        spec = spec_of(parameter)
        assert parameter.device.type == "meta", "storage comes later"
        assert tuple(parameter.shape) == spec.sizes
        assert spec.numel == 96 // size
        rows, columns = (slice(a, a + n) for a, n in zip(spec.offsets, spec.sizes, strict=True))
        full[rows, columns] += 1
    assert full.eq(1).all()


def test_padding_reaches_beyond_the_shape() -> None:
    whole = ParameterSpec(name="w", shape=(11, 6), split_dim=0, multiple=8)
    spec = spec_of(new_parameter(sharding(4, 3), whole))
    assert (spec.shape, spec.offsets, spec.sizes) == ((11, 6), (24, 0), (8, 6))


def test_initial_values_are_the_same_in_every_layout() -> None:
    def values(size: int, index: int) -> torch.Tensor:
        parameter = new_parameter(
            sharding(size, index), ParameterSpec(name="w", shape=(8, 12), split_dim=0, std=0.1)
        )
        out = torch.empty(spec_of(parameter).sizes)
        spec_of(parameter).initialise(out, seed=3)
        return out

    whole = values(1, 0)
    assert torch.cat([values(4, index) for index in range(4)]).equal(whole)
    assert not whole.eq(whole[0, 0]).all()


def test_constant_initial_values() -> None:
    out = torch.empty(5)
    whole = ParameterSpec(name="norm", shape=(5,), fill=1.0)
    spec_of(new_parameter(sharding(2, 1), whole)).initialise(out, seed=3)
    assert out.eq(1).all()


@pytest.mark.parametrize(
    ("size", "sequence_parallel", "partial"), [(2, True, True), (2, False, False), (1, True, False)]
)
def test_sums_over_the_sequence_are_partial_only_where_it_is_split(
    size: int, sequence_parallel: bool, partial: bool
) -> None:
    whole = ParameterSpec(name="norm", shape=(4,), sequence_partial=True)
    spec = spec_of(new_parameter(sharding(size, 0, sequence_parallel), whole))
    assert spec.sequence_partial is spec.partial is partial
