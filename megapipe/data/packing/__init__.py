"""Samples of whole documents, packed with little padding."""

from megapipe.data.packing.dataset import PackedDataset
from megapipe.data.packing.index import Packing, PackingRule, open_packing

__all__ = ["PackedDataset", "Packing", "PackingRule", "open_packing"]
