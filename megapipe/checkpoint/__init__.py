"""Checkpoints that any layout can load: safetensors files and a JSON manifest, no pickle.

An entry is a global tensor (``model/layers.0.attention.qkv.weight``,
``optimizer.exp_avg/layers.0...``), stored as pieces in the files of the ranks that wrote them.
A checkpoint folder contains only::

    manifest.json                  see megapipe.checkpoint.manifest
    <rank>-<part>.safetensors      see megapipe.checkpoint.shard

:mod:`~megapipe.checkpoint.writer` explains the order of writes that makes a save atomic,
:mod:`~megapipe.checkpoint.names` the names of the folders and of the files next to them.
"""

from megapipe.checkpoint.reader import Checkpoint, NewestCheckpoint, find_newest
from megapipe.checkpoint.regions import Region, flat_regions, intersect, whole
from megapipe.checkpoint.retention import Removal, clear_leftovers, outdated, remove
from megapipe.checkpoint.writer import Meta, Piece, SaveGroup, SingleProcess, save

__all__ = [
    "Checkpoint",
    "Meta",
    "NewestCheckpoint",
    "Piece",
    "Region",
    "Removal",
    "SaveGroup",
    "SingleProcess",
    "clear_leftovers",
    "find_newest",
    "flat_regions",
    "intersect",
    "outdated",
    "remove",
    "save",
    "whole",
]
