"""Folders of torch.distributed.checkpoint (DCP), read and written by one process.

A folder has a ``.metadata`` file, which is pickled and says where each piece of each tensor is, and
files with the pieces. Neither reading nor writing needs a process group.
"""

METADATA = ".metadata"
