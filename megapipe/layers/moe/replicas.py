"""Expert replicas: slots of a rank for the experts that it owns, and for replicas of others.

A rank has a slot for each expert that it owns and, after them, as many replica slots as the rank
with the most replicas needs; other ranks leave slots empty. Slot p of rank r has number r x P + p,
with P slots on each rank. Rows are dispatched to slots. Which slot gets this rank's rows for an
expert follows from the map and the rank (:func:`megapipe.experts.row_routing.destinations`).

After each change of weights, owners send the unsharded weights to replicas. A rank waits for them
only when it computes rows of its replicas. Gradients of replicas have their own memory, in no
bucket. Once a step they are sent to the owner, which adds them to its gradients in rank order. So
the owner's bucket, the norm and the update include them. Replicas are not parameters, and not in
checkpoints.

All ranks that share experts call each exchange, even ranks without replicas. With etp, a rank
exchanges with the ranks that have the same part of experts. Sizes follow from the map. If no rank
has a replica, nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn import Parameter

from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import Wait, start_all_to_all
from megapipe.experts.map import ExpertMap
from megapipe.experts.row_routing import destinations
from megapipe.layers.moe.owners import ExpertOwners
from megapipe.layers.parameter import spec_of
from megapipe.layers.weight_grad import main_grad
from megapipe.layers.weight_replicas import SharedTensor
from megapipe.ops.transfer import to_device


class ExpertReplicas:
    """Expert slots of one layer on this rank. `parameters` are the owned experts, with storage;
    `owners` has the current map. `ep` has the ranks that share the layer's experts. `etp` is the
    number of adjacent ranks with the same experts, `node` the number of such groups on a node."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        owners: ExpertOwners,
        ep: Axis,
        etp: int,
        node: int,
    ) -> None:
        self._parameters, self._ep, self._etp, self._node = parameters, ep, etp, node
        self._rank, self._part = divmod(ep.index, etp)
        self.owners = owners
        names = [spec_of(each).name for each in parameters]
        slots = self.map.slots
        weights = (p.detach().new_zeros((slots, *p.shape[1:])) for p in parameters)
        self._weights = dict(zip(names, weights, strict=True))
        """Weights of the local replicas by name, [slots, ...], in the order of the map."""
        grads = (main_grad(p).new_zeros((slots, *p.shape[1:])) for p in parameters)
        self._grads = dict(zip(names, grads, strict=True))
        """Main gradients of the local replicas by name, [slots, ...]."""
        self._coming: tuple[Tensor, Wait] | None = None
        """Weights in flight to this rank."""
        self._current = False
        """Whether the weights have been sent to replicas since the weights changed."""
        self._slot_of_expert: Tensor | None = None
        """[experts]: slot that gets the local tokens' rows for each expert; None: slot numbers
        equal expert ids."""

    @property
    def map(self) -> ExpertMap:
        """Current map of owners and replicas."""
        return self.owners.map

    @property
    def owned(self) -> int:
        """Number of experts that each rank owns."""
        return self.map.experts // self.map.ranks

    @property
    def replicas_per_rank(self) -> int:
        """Number of replica slots on each rank."""
        return max(map(len, self.map.replicas))

    @property
    def num_slots(self) -> int:
        """Number of slots on all ranks."""
        return self.map.ranks * (self.owned + self.replicas_per_rank)

    def set_map(self, after: ExpertMap) -> None:
        """Replace the map by `after`, between steps. All ranks call it."""
        self.mark_stale()
        self.owners.map = after
        found = [self._slot_of(expert) for expert in range(after.experts)]
        self._slot_of_expert = None
        if found != list(range(after.experts)):
            slots = torch.tensor(found, dtype=torch.int16)
            self._slot_of_expert = to_device(slots, self._parameters[0].device)

    def _slot_of(self, expert: int) -> int:
        """Return the slot that gets the local tokens' rows for an expert."""
        of = self.map
        goal = destinations(of.holders(expert), of.ranks, self._node)[self._rank]
        first = goal * (self.owned + self.replicas_per_rank)
        if of.owners[expert] == goal:
            return first + of.owned(goal).index(expert)
        return first + self.owned + of.replicas[goal].index(expert)

    def to_slots(self, choice: Tensor) -> Tensor:
        """Replace expert ids by slot numbers in a choice from
        :func:`~megapipe.layers.moe.routing.route_tokens`; dropped choices stay negative."""
        if self._slot_of_expert is None:
            return choice
        slots = self._slot_of_expert[choice.clamp(min=0).long()]
        return torch.where(choice < 0, choice, slots)

    def mark_stale(self) -> None:
        """Mark replicas as stale: weights have changed, or will change. All ranks call it."""
        self._arrive()
        self._current = False

    def start_broadcast(self) -> None:
        """Start sending the local experts' weights to the ranks with replicas, unless replicas are
        current. Weights must be unsharded. All ranks call it."""
        if self.replicas_per_rank and not self._current:
            values = [p.detach() for p in self._parameters]
            self._coming = self._exchange(values, self._leaving(), self._staying())
            self._current = True

    def weights(self, parameter: Parameter) -> Tensor:
        """Return a parameter's weights of the local replicas, [slots, ...]; wait for them first."""
        self.wait_broadcast()
        return self._weights[spec_of(parameter).name]

    def wait_broadcast(self) -> None:
        """Wait for the weights of the local replicas, after starting the broadcast if needed. All
        ranks call it."""
        self.start_broadcast()
        self._arrive()

    def _arrive(self) -> None:
        if self._coming is None:
            return
        received, wait = self._coming
        self._coming = None
        wait()
        copies = [copy for own in self._staying() for copy in own]
        for number, tensors in self._parts(received, copies):
            for copy, values in zip(self._weights.values(), tensors, strict=True):
                copy[number].copy_(values)

    def replicated_weights(self) -> Iterator[SharedTensor]:
        """Yield each parameter's weights [...] for each local expert that is on several ranks.
        Replicas are current once :meth:`wait_broadcast` has returned."""
        present = self.map
        own, copied = present.owned(self._rank), present.replicas[self._rank]
        elsewhere = set(chain.from_iterable(present.replicas))
        for parameter in self._parameters:
            name = spec_of(parameter).name
            for number, expert in enumerate(own):
                if expert in elsewhere:
                    yield self._tensor(name, expert, parameter.detach()[number])
            for number, expert in enumerate(copied):
                yield self._tensor(name, expert, self._weights[name][number])

    def _tensor(self, name: str, expert: int, values: Tensor) -> SharedTensor:
        key = f"{name} expert {expert} part {self._part}"
        return SharedTensor(key, f"{name}, expert {expert}", values)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the persistent tensors: weights and gradients of replicas, and the slot table."""
        yield from (*self._weights.values(), *self._grads.values())
        if self._slot_of_expert is not None:
            yield self._slot_of_expert

    def main_grads(self, parameter: Parameter) -> list[Tensor]:
        """Return the main gradients of the experts in all local slots, to accumulate into."""
        return [*main_grad(parameter), *self._grads[spec_of(parameter).name]]

    def zero_grad(self) -> None:
        """Start a step: zero the replicas' gradients."""
        for grad in self._grads.values():
            grad.zero_()

    def start_grad_return(self) -> tuple[Tensor, Wait] | None:
        """Start sending the step's replica gradients to the experts' owners. All ranks call it."""
        if not self.replicas_per_rank:
            return None
        return self._exchange(list(self._grads.values()), self._staying(), self._leaving())

    def add_returned_grads(self, received: Tensor) -> None:
        """Add received replica gradients to those of the local experts."""
        owned = [expert for own in self._leaving() for expert in own]
        for number, tensors in self._parts(received, owned):
            for parameter, values in zip(self._parameters, tensors, strict=True):
                main_grad(parameter)[number] += values

    def _leaving(self) -> list[list[int]]:
        """Return, for each rank, the indices of the local experts whose replicas the rank has."""
        own = self.map.owned(self._rank)
        return [[own.index(e) for e in each if e in own] for each in self.map.replicas]

    def _staying(self) -> list[list[int]]:
        """Return, for each owner rank, the indices of local replicas of its experts."""
        owners = [self.map.owners[expert] for expert in self.map.replicas[self._rank]]
        ranks = range(self.map.ranks)
        return [[i for i, owner in enumerate(owners) if owner == rank] for rank in ranks]

    def _exchange(
        self, values: Sequence[Tensor], to: Sequence[Sequence[int]], by: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Wait]:
        """Start an all-to-all of experts. `to[r]`: indices into `values` [experts, ...] of the
        experts to send to rank r; `by[r]`: as many items as experts that rank r sends here."""
        size = sum(each[0].numel() for each in values)
        sent = [each[i].flatten() for own in to for i in own for each in values]
        flat = torch.cat(sent) if sent else values[0].new_empty(0)
        return start_all_to_all(flat, self._ep, self._lengths(to, size), self._lengths(by, size))

    def _lengths(self, of_ranks: Sequence[Sequence[int]], size: int) -> list[int]:
        """Return the message length per member of the group; 0 for members with other etp parts."""
        parts = range(self._etp)
        return [len(own) * size * (part == self._part) for own in of_ranks for part in parts]

    def _parts(
        self, received: Tensor, indices: Sequence[int]
    ) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield each expert index with the expert's received values, one tensor per parameter."""
        shapes = [p.shape[1:] for p in self._parameters]
        sizes = [shape.numel() for shape in shapes]
        for index, values in zip(indices, received.split(sum(sizes)), strict=bool(indices)):
            parts = values.split(sizes)
            yield index, [p.view(shape) for p, shape in zip(parts, shapes, strict=True)]
