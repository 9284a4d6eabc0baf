"""Detection of hangs: each rank records what it does in a memory-mapped file, and a monitor process
on the node reads these files."""
