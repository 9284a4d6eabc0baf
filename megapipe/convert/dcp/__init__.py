"""Folders of torch.distributed.checkpoint (DCP), read and written by one process.

A folder has a ``.metadata`` file, which is pickled and says where each piece of each tensor lies,
and files with the pieces. No process group is needed for either way.
"""

METADATA = ".metadata"
