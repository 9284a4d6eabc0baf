"""Files of arrays that are read on demand; none is loaded as a whole or memory-mapped."""

from megapipe.data.stored.array import Array, StoredArray
from megapipe.data.stored.checksums import crc_of, write_checksums
from megapipe.data.stored.file import StoredFile
from megapipe.data.stored.memory_budget import MemoryBudget

__all__ = ["Array", "MemoryBudget", "StoredArray", "StoredFile", "crc_of", "write_checksums"]
