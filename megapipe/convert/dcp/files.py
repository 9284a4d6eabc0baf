"""The tensors of a DCP folder, read by slices."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from megapipe.checkpoint.regions import Region, first_uncovered, intersect
from megapipe.convert.dcp import METADATA
from megapipe.convert.dcp.metadata import read_metadata
from megapipe.errors import CheckpointError
from megapipe.model.tensor_files import DTYPES, StoredTensor, StoredTensors
from megapipe.text import one_line

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class DcpFiles(StoredTensors):
    """Tensors in a DCP folder; none is kept in memory. Make one with :meth:`open`."""

    rows_at_once = 1 << 40  # all rows: even for a few rows, whole pieces are read

    def __init__(self, folder: Path, metadata: Metadata, prefix: str) -> None:
        shards = {
            name.removeprefix(prefix): stored
            for name, stored in metadata.state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(stored, TensorStorageMetadata)
        }
        tensors = {
            name: StoredTensor(
                METADATA,
                _NAMES.get(stored.properties.dtype, str(stored.properties.dtype)),
                tuple(stored.size),
            )
            for name, stored in shards.items()
        }
        super().__init__(folder, tensors)
        self._prefix = prefix
        self._shards = {
            name: [Region(tuple(x.offsets), tuple(x.sizes)) for x in stored.chunks]
            for name, stored in shards.items()
        }
        self._storage_data = metadata.storage_data
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)

    @classmethod
    def open(cls, folder: Path, *, prefix: str = "", trust: bool = False) -> DcpFiles:
        """Read the index. Tensors with `prefix` get names without the prefix; other tensors are
        ignored.

        Raises:
            CheckpointError: the index is missing or damaged, or would run code and is not trusted;
                with `trust` it may run any code.
        """
        return cls(folder, read_metadata(folder, trust=trust), prefix)

    @property
    def files(self) -> list[str]:
        """Names of the files in the folder."""
        return sorted(path.name for path in self.folder.glob("*.distcp"))

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return the slices `index` of a tensor (default: all of it) as a new contiguous tensor.
        Pieces that overlap with the slices are read whole, one at a time."""
        shape, dtype = self.tensors[name].shape, self.dtype(name)
        parts = (*index, *(slice(None) for _ in shape[len(index) :]))
        spans = [part.indices(n)[:2] for part, n in zip(parts, shape, strict=True)]
        wanted = Region(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
        out = torch.empty(wanted.sizes, dtype=dtype)
        for shard, file in self._checked(name):
            if (item := self._item(name, shard, wanted)) is not None:
                self._read(name, file, item, out)
        return out

    def _read(self, name: str, file: str, item: ReadItem, out: Tensor) -> None:
        try:
            self._reader.read_data(LoadPlan([item]), _Into(out)).wait()
        except OSError as error:
            raise CheckpointError(f"cannot read {self.folder / file}: {one_line(error)}") from None
        except Exception as error:  # whatever a damaged file raises
            where = f"{self.folder / file}: tensor {name}"
            raise CheckpointError(f"{where}: {one_line(error)}") from None

    def _checked(self, name: str) -> list[tuple[Region, str]]:
        """Return the pieces of a tensor, each with the name of its file. Raises CheckpointError
        unless the pieces tile the tensor and the files are in the folder."""
        shape, shards = self.tensors[name].shape, self._shards[name]
        if any(not shard.fits(shape) for shard in shards) or first_uncovered(shape, shards):
            raise CheckpointError(
                f"{self.folder / METADATA}: the pieces of tensor {name} do not cover its shape "
                f"{list(shape)}"
            )
        found = []
        for shard in shards:
            at = self._storage_data.get(MetadataIndex(self._prefix + name, shard.offsets))
            file = getattr(at, "relative_path", None)
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(
                    f"{self.folder / METADATA}: {file!a}, for tensor {name}, is not a file of "
                    "the folder"
                )
            found.append((shard, file))
        return found

    def _item(self, name: str, shard: Region, wanted: Region) -> ReadItem | None:
        common = intersect(shard, wanted)
        if common is None:
            return None

        def inside(outer: Region) -> torch.Size:
            return torch.Size(part.start for part in common.inside(outer))

        full = self._prefix + name
        return ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(full),
            dest_offsets=inside(wanted),
            storage_index=MetadataIndex(full, shard.offsets),
            storage_offsets=inside(shard),
            lengths=torch.Size(common.sizes),
        )


class _Into(DefaultLoadPlanner):
    """A load planner that reads everything into one tensor."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self._out = out

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the one tensor for any index."""
        return self._out
