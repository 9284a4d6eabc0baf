"""Files sent between the members of a group, through host memory in blocks of bounded size."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import all_gather, all_to_all

PIECE = 16 << 20
"""Maximum number of bytes that one member sends to another in one all-to-all."""


def exchange_files(axis: Axis, outgoing: Mapping[int, Sequence[Path]], into: Path) -> list[Path]:
    """Send the files `outgoing[i]` to member i. Return the paths of the received files, which are
    created in `into` under their old names.

    Collective. No two files for one member may have the same name. If a local file cannot be read
    or written, OSError is raised after the exchange; other members may then have received wrong
    bytes.
    """
    if axis.group is None:
        return []
    sent = [_Sent(outgoing.get(member, ())) for member in range(axis.size)]
    received = [_Received(into, names) for names in _swap([each.names for each in sent], axis)]
    most = max(each.left for each in sent)
    for _ in range(int(all_gather(torch.tensor([-(-most // PIECE)]), axis).max())):
        lengths = [min(each.left, PIECE) for each in sent]
        coming = [min(each.left, PIECE) for each in received]
        data = torch.empty(sum(lengths), dtype=torch.uint8)
        for each, part in zip(sent, data.split(lengths), strict=True):
            each.fill(part)
        got = all_to_all(data, lengths, coming, axis)
        for taker, part in zip(received, got.split(coming), strict=True):
            taker.take(part)
    for ended in (*sent, *received):
        ended.close()
    return [path for each in received for path in each.paths]


def _swap(own: Sequence[object], axis: Axis) -> list[list[tuple[str, int]]]:
    """Send the i-th object to member i, as JSON. Return the objects received, by member."""
    texts = [json.dumps(each).encode() for each in own]
    lengths = [len(text) for text in texts]
    ones = [1] * axis.size
    coming = all_to_all(torch.tensor(lengths), ones, ones, axis).tolist()
    data = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
    parts = all_to_all(data, lengths, coming, axis).split(coming)
    return [json.loads(bytes(part.numpy())) for part in parts]


class _Stream:
    """Several files as one stream of bytes. After an error the stream no longer reads or writes,
    but still counts bytes, so that the collectives of all members continue in step."""

    def __init__(self, files: Sequence[tuple[Path, int]], flags: int) -> None:
        self.paths = [path for path, _ in files]
        self.left = sum(size for _, size in files)
        """Number of bytes left in the stream."""
        self._files = [(path, size) for path, size in reversed(files) if size]
        self._flags = flags | os.O_CLOEXEC | os.O_NOFOLLOW
        self._handle: int | None = None
        self._rest = 0
        """Number of bytes left in the open file."""
        self.error: OSError | None = None

    def close(self) -> None:
        """Close the open file, and raise the error that occurred, if any."""
        if self._handle is not None:
            os.close(self._handle)
        if self.error is not None:
            raise self.error

    def _pass(self, data: memoryview) -> None:
        """Read the next bytes of the files into `data`, or write `data` as the next bytes."""
        self.left -= len(data)
        try:
            while len(data) and self.error is None:
                if not self._rest:
                    self._open_next()
                assert self._handle is not None
                done = self._move(self._handle, data[: self._rest])
                data, self._rest = data[done:], self._rest - done
        except OSError as error:
            self.error = error

    def _open_next(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        path, self._rest = self._files.pop()
        self._handle = os.open(path, self._flags, 0o600)

    def _move(self, handle: int, data: memoryview) -> int:
        raise NotImplementedError


class _Sent(_Stream):
    """Files that this member sends to another."""

    def __init__(self, paths: Sequence[Path]) -> None:
        problem, files = None, []
        for path in paths:
            try:
                files.append((path, path.stat().st_size))
            except OSError as error:
                problem = error
        super().__init__(files, os.O_RDONLY)
        self.error = problem
        self.names = [(path.name, size) for path, size in files]

    def fill(self, out: Tensor) -> None:
        self._pass(out.numpy().data)

    def _move(self, handle: int, data: memoryview) -> int:
        done = os.readv(handle, [data])
        if not done:
            raise OSError(0, "the file has become shorter", str(self.paths))
        return done


class _Received(_Stream):
    """Files that this member receives from another."""

    def __init__(self, into: Path, names: Sequence[tuple[str, int]]) -> None:
        files = [(into / Path(name).name, size) for name, size in names]
        super().__init__(files, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def take(self, data: Tensor) -> None:
        self._pass(data.numpy().data)

    def _move(self, handle: int, data: memoryview) -> int:
        return os.write(handle, data)
