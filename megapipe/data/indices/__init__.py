"""Samples in Megatron-LM's order, by index arrays that equal those of Megatron-LM."""

from megapipe.data.indices.blend import blend_index
from megapipe.data.indices.cached_blend import open_blend
from megapipe.data.indices.counts import EpochCounts
from megapipe.data.indices.dataset import IndexedDataset
from megapipe.data.indices.indices import Indices, Request, open_indices
from megapipe.data.indices.mixing import Blend
from megapipe.data.indices.samples import sample_index
from megapipe.data.indices.shares import BlendSizes

__all__ = [
    "Blend",
    "BlendSizes",
    "EpochCounts",
    "IndexedDataset",
    "Indices",
    "Request",
    "blend_index",
    "open_blend",
    "open_indices",
    "sample_index",
]
