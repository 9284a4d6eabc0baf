"""Files of arrays that are read as they are needed; none is held as a whole, and none is mapped."""

from megapipe.data.stored.array import Array, StoredArray
from megapipe.data.stored.checksums import crc_of, write_checksums
from megapipe.data.stored.file import StoredFile
from megapipe.data.stored.room import MemoryBudget

__all__ = ["Array", "MemoryBudget", "StoredArray", "StoredFile", "crc_of", "write_checksums"]
