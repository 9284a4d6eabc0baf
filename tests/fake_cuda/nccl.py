"""A stand-in for torch's ProcessGroupNCCL, over gloo, with NCCL's rules.

- Tensors are contiguous, on the current device, and on no other.
- A communicator is made when it is first used, and its members wait for each other there: groups
  that are first used in different orders on different ranks hang (here until gloo's timeout).
- An asynchronous operation runs on a stream of its communicator, after what the current stream has
  in it by then. Its results are there, and what it reads may change, for streams that have waited
  (:mod:`tests.fake_cuda.works`). A synchronous one runs on the current stream.
- A message that is sent never holds up the host.

Operations are matched by order; :mod:`tests.fake_cuda.ledger` compares the orders at the end. Sums
are added up in the order of the ranks.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ReduceOp, Store
from torch.distributed import distributed_c10d as c10d

from tests.fake_cuda.device import Device
from tests.fake_cuda.ledger import Ledger
from tests.fake_cuda.works import Frozen, Pending, Receiving, Sending, on_host, spoil

REDUCTIONS: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": (ReduceOp.SUM, torch.add),
    "product": (ReduceOp.PRODUCT, torch.mul),
    "max": (ReduceOp.MAX, torch.maximum),
    "min": (ReduceOp.MIN, torch.minimum),
}


class Options:
    """Stand-in for torch's options, with the fields that callers set."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()
        self._timeout = datetime.timedelta(minutes=10)
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


class Communicator:
    """A gloo group and a stream; making one waits for the other members."""

    def __init__(
        self, name: str, store: Store, rank: int, size: int, options: Options, device: Device
    ) -> None:
        patience = store.timeout
        store.set_timeout(options._timeout)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
        store.set_timeout(patience)
        self.size = size
        self._store = store
        self.name = name
        self.kinds: set[str] = set()
        """Collectives that were made: NCCL makes ready for each kind at the first."""
        self._operations = 0
        self.stream = torch.cuda.Stream(priority=-1)  # from a pool that nothing else uses
        device.name_stream(self.stream, f"NCCL's stream {name}")

    def gather(self, tensor: Tensor) -> tuple[Any, list[Tensor]]:
        """Start to collect every member's bytes; return the work, and the tensors for the bytes."""
        own = on_host(tensor).clone()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        return self.gloo.allgather([parts], [own]), parts

    def agree(self, what: str) -> None:
        """Raise RuntimeError if another member's next operation is not `what`.

        NCCL would hang or mix them up; gloo ends the process if their lengths differ.
        """
        self._operations += 1
        first = self._store.compare_set(f"operation {self._operations}", "", what).decode()
        if first != what:
            raise RuntimeError(
                f"collectives {self.name}: number {self._operations} is {what} here and {first} "
                "on another member"
            )


def install(device: Device, ledger: Ledger) -> None:
    """Let torch make process groups of this kind for nccl; they write to `ledger`."""

    class ProcessGroupNCCL(StandIn):
        """The class that torch finds by this name."""

        Options = Options

        def __init__(self, store: Store, rank: int, size: int, options: Options) -> None:
            super().__init__(store, rank, size, options, device=device, ledger=ledger)

    module: Any = dist
    torch.cuda.nccl.version = lambda: (2, 27, 0)  # type: ignore[attr-defined]
    c10d._NCCL_AVAILABLE = True
    for place in (c10d, module):
        place.is_nccl_available = lambda: True
        place.ProcessGroupNCCL = ProcessGroupNCCL
        place.batch_isend_irecv = batch


def batch(operations: Sequence[dist.P2POp]) -> list[Pending]:
    """Start messages as one operation, which all ranks start at the same place of their programs.

    So a host may wait for it at any time, as for a collective: its receives do not count as
    spinning until this host goes on.
    """
    return [
        op.group.send([op.tensor], op.group_peer, of_batch=True)
        if op.op is dist.isend
        else op.group.recv([op.tensor], op.group_peer, of_batch=True)
        for op in operations
    ]


class StandIn(dist.ProcessGroup):
    """A process group on the device, with the methods that torch's functions call."""

    _device_types = (torch.device("cuda"),)

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        options: Options,
        *,
        device: Device,
        ledger: Ledger,
    ) -> None:
        super().__init__(rank, size)
        self.options = options
        self._store = store
        self._me = rank
        self._size = size
        self._device = device
        self._ledger = ledger
        ranks = options.global_ranks_in_group or range(size)
        ledger.rank = ranks[rank]
        self._notes = ledger.open(options.group_name, ranks)
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        self._under_way: list[Any] = []
        """Messages that gloo may still read."""

    def getBackendName(self) -> str:
        return "nccl"

    def name(self) -> str:
        return "nccl"

    def _set_sequence_number_for_group(self) -> None:
        pass

    def shutdown(self) -> None:
        self._under_way.clear()
        self._communicators.clear()

    def abort(self) -> None:
        self.shutdown()

    # -- collectives, as torch.distributed's functions call them

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        (tensor,) = tensors
        op = getattr(opts, "reduceOp", ReduceOp.SUM)
        return self._reduce("all_reduce", tensor, tensor, op, slice(None), opts)

    def reduce_scatter_single(self, out: Tensor, whole: Tensor, opts: Any = None) -> Any:
        if whole.numel() != out.numel() * self._size:
            raise ValueError("reduce_scatter: the input is not as long as all outputs")
        own = slice(self._me * out.numel(), (self._me + 1) * out.numel())
        op = getattr(opts, "reduceOp", ReduceOp.SUM)
        return self._reduce("reduce_scatter", whole, out, op, own, opts)

    def all_gather_single(self, out: Tensor, piece: Tensor, opts: Any = None) -> Any:
        if out.numel() != piece.numel() * self._size:
            raise ValueError("all_gather: the output is not as long as all inputs")
        before, own, after = out.view(-1).split_with_sizes(
            [piece.numel() * n for n in (self._me, 1, self._size - self._me - 1)]
        )
        in_place = piece.data_ptr() == own.data_ptr()
        if not in_place and _overlap(out, piece):
            raise ValueError("all_gather: the input is in the output, but not in its own place")

        def begin(line: Communicator) -> Callable[[], list[Tensor]]:
            work, parts = line.gather(piece)
            return lambda: work.wait() and [torch.cat(parts)]

        changed = [before, after] if in_place else None
        return self._collective("all_gather", [piece], [out], begin, opts, changed=changed)

    def allgather(self, outs: Sequence[Any], ins: Sequence[Tensor], opts: Any = None) -> Any:
        def begin(line: Communicator) -> Callable[[], list[Tensor]]:
            work, parts = line.gather(ins[0])
            return lambda: work.wait() and parts

        return self._collective("all_gather_list", ins, list(outs[0]), begin, opts)

    def gather(self, outs: Sequence[Any], ins: Sequence[Tensor], opts: Any = None) -> Any:
        targets = list(outs[0]) if outs else []

        def begin(line: Communicator) -> Callable[[], list[Tensor]]:
            work, parts = line.gather(ins[0])
            return lambda: work.wait() and parts[: len(targets)]

        what = f"to {opts.rootRank}"
        return self._collective("gather", ins, targets, begin, opts, more=what)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        root = opts.rootRank

        def begin(line: Communicator) -> Callable[[], list[Tensor]]:
            work, parts = line.gather(tensors[0])
            return lambda: work.wait() and [parts[root]]

        changed = [] if root == self._me else None
        return self._collective(
            "broadcast", tensors, tensors, begin, opts, changed=changed, more=f"from {root}"
        )

    def alltoall_base(
        self,
        out: Tensor,
        given: Tensor,
        takes: Sequence[int],
        gives: Sequence[int],
        opts: Any = None,
    ) -> Any:
        width = given.itemsize * (given[0].numel() if len(given) else 1)
        takes, gives = ([n * width for n in lengths] for lengths in (takes, gives))

        def begin(line: Communicator) -> Callable[[], list[Tensor]]:
            got, own = torch.empty_like(on_host(out)), on_host(given).clone()
            options = dist.AllToAllOptions()
            work = line.gloo.alltoall_base(got, own, list(takes), list(gives), options)
            kept = [own]
            return lambda: work.wait() and kept and [got]

        return self._collective("all_to_all", [given], [out], begin, opts, alike=False)

    all_to_all_single = alltoall_base
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts: Any = None) -> Any:
        """Run an all-reduce, and let the host wait for it."""
        self.allreduce([torch.zeros(1, device="cuda")], SimpleNamespace(asyncOp=False))
        torch.cuda.synchronize()

    # -- messages

    def send(
        self, tensors: Sequence[Tensor], peer: int, tag: int = 0, *, of_batch: bool = False
    ) -> Sending:
        (tensor,) = self._checked(tensors)
        line, end = self._way(peer, of_batch)
        self._notes.sent.setdefault(peer, []).append(_kind(tensor))
        self._ledger.counts["send"] += 1
        bytes_ = [on_host(tensor).clone()]
        self._under_way.append((bytes_, line.gloo.send(bytes_, end, tag)))
        event = self._run(line, "send", [tensor], [])
        tensor.record_stream(line.stream)
        name = f"send of {_kind(tensor)} to {self._notes.ranks[peer]}"
        return Sending(name, Frozen([tensor]), event, lambda: None, self._ledger)

    def recv(
        self, tensors: Sequence[Tensor], peer: int, tag: int = 0, *, of_batch: bool = False
    ) -> Pending:
        (tensor,) = self._checked(tensors)
        line, end = self._way(peer, of_batch)
        self._notes.received.setdefault(peer, []).append(_kind(tensor))
        self._ledger.counts["recv"] += 1
        bytes_ = torch.empty_like(on_host(tensor))
        work = line.gloo.recv([bytes_], end, tag)
        event = self._run(line, "recv", [], [tensor])
        tensor.record_stream(line.stream)
        spoil(tensor)

        def finish() -> None:
            work.wait()
            on_host(tensor).copy_(bytes_)

        name = f"recv of {_kind(tensor)} from {self._notes.ranks[peer]}"
        if of_batch:
            return Pending(name, Frozen([]), event, finish, self._ledger)
        return Receiving(name, Frozen([]), event, finish, self._ledger, device=self._device)

    # -- what they share

    def _reduce(self, name: str, given: Tensor, out: Tensor, op: Any, own: slice, opts: Any) -> Any:
        known = [(word, add) for word, (each, add) in REDUCTIONS.items() if op == each]
        if not known:
            raise ValueError(f"{name}: {op} is not stood in for")
        ((word, add),) = known

        def begin(line: Communicator) -> Callable[[], list[Tensor]]:
            work, parts = line.gather(given)

            def result() -> list[Tensor]:
                work.wait()
                total, *others = (part.view(given.dtype)[own] for part in parts)
                for other in others:
                    total = add(total, other)
                return [total.contiguous().view(torch.uint8)]

            return result

        return self._collective(name, [given], [out], begin, opts, more=word)

    def _collective(
        self,
        name: str,
        ins: Sequence[Tensor],
        outs: Sequence[Tensor],
        begin: Callable[[Communicator], Callable[[], list[Tensor]]],
        opts: Any,
        *,
        changed: Sequence[Tensor] | None = None,
        alike: bool = True,
        more: str = "",
    ) -> Pending | None:
        """Run a collective; `begin` returns a function that waits for the bytes of the outputs.

        `changed`: the parts of the outputs that are written, by default all. `alike`: inputs are
        equally long on all members.
        """
        self._checked([*ins, *outs])
        kind = _kind(ins[0]) if alike else str(ins[0].dtype)
        line = self._line()
        what = f"{name} {kind} {more}".rstrip()
        self._ledger.collective(self._notes, name, what)
        line.agree(what)
        if name not in line.kinds and self._device.spinning:
            self._ledger.fault(f"the first {name} {line.name} is made while a receive spins")
        line.kinds.add(name)
        result = begin(line)
        changed = outs if changed is None else changed

        def finish() -> None:
            for out, values in zip(outs, result(), strict=True):
                on_host(out).copy_(values)

        if not getattr(opts, "asyncOp", True):
            torch.ops.fake_cuda.use(list(ins), list(changed), f"NCCL's {name}")
            finish()
            return None
        event = self._run(line, name, ins, changed)
        frozen = Frozen([x for x in ins if not any(_overlap(x, part) for part in changed)])
        for part in changed:
            spoil(part)
        return Pending(f"{name} of {kind}", frozen, event, finish, self._ledger)

    def _run(
        self, line: Communicator, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> torch.Event:
        """Launch a kernel on the communicator's stream; return the event of its end."""
        line.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(line.stream):
            torch.ops.fake_cuda.use(list(reads), list(writes), f"NCCL's {name}")
        event: torch.Event = line.stream.record_event()
        return event

    def _line(self, *pair: int) -> Communicator:
        """Return the communicator of all members, or of a pair of them."""
        key = tuple(sorted(pair))
        if key not in self._communicators:
            store = PrefixStore(f"communicator {key}", self._store)
            me, size = (key.index(self._me), 2) if key else (self._me, self._size)
            ranks = tuple(self._notes.ranks[i] for i in key) or self._notes.ranks
            name = f"of ranks {','.join(map(str, ranks))}"
            self._communicators[key] = Communicator(
                name, store, me, size, self.options, self._device
            )
            self._ledger.communicators += 1
        return self._communicators[key]

    def _way(self, peer: int, of_batch: bool) -> tuple[Communicator, int]:
        """Return the communicator of a message, and the peer's rank in it. Batches use the
        communicator of all members, other messages that of the two."""
        if of_batch:
            return self._line(), peer
        return self._line(self._me, peer), int(peer > self._me)

    def _checked(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors. Raises ValueError if NCCL would, or would do something else."""
        for tensor in tensors:
            if not tensor.is_cuda:
                raise ValueError(f"NCCL takes tensors of a GPU, not of {tensor.device}")
            if not tensor.is_contiguous():
                raise ValueError(f"NCCL takes contiguous tensors, not strides {tensor.stride()}")
            if tensor.get_device() != torch.cuda.current_device():
                raise ValueError(
                    f"NCCL was given a tensor of {tensor.device}; the current device is "
                    f"cuda:{torch.cuda.current_device()}"
                )
        return tensors


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tensor.numel()}"


def _overlap(a: Tensor, b: Tensor) -> bool:
    start, end = a.data_ptr(), a.data_ptr() + a.nbytes
    return max(start, b.data_ptr()) < min(end, b.data_ptr() + b.nbytes)
