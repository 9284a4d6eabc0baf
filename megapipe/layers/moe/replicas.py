"""Places of experts on ranks: those that a rank owns, and copies of others.

A rank has a place for each expert that it owns and as many after them as the rank with most copies
has of those; a copy is in one, the others stay empty. Place p of rank r has the number r x P + p,
with P places on each rank. Rows go to places as they would to experts, all of which are owned where
there are no copies. Where a rank's rows for an expert go follows from the map and from the rank
(:func:`megapipe.experts.rows.destinations`).

Owners send the weights of copies after each change of weights, when these are whole, to be awaited
where rows of copies are computed first. Gradients of copies have memory of their own, in no bucket.
They go home once a step, where the owner adds them to its own, those of the lowest rank first, and
are then in its bucket, in the norm and in the update like any. So copies are no parameters, and are
in no checkpoint.

All ranks that share experts call each exchange, also those without copies; of etp neighbours each
exchanges with those that have its part. Sizes follow from the map. Where no rank has a copy there
is no exchange.
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
from megapipe.experts.rows import destinations
from megapipe.layers.moe.owners import ExpertOwners
from megapipe.layers.parameter import spec_of
from megapipe.layers.weight_grad import main_grad
from megapipe.layers.weight_replicas import SharedTensor
from megapipe.ops.transfer import to_device


class ExpertReplicas:
    """Those of a layer, of which `parameters` are the experts that this rank owns; they have their
    storage. `owners` has the map in force, `ep` are the ranks with experts of the layer, of which
    `etp` neighbours have parts of the same ones; a node has `node` times as many."""

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
        """By name, [slots, ...]: those of the copies here, in the order of the map."""
        grads = (main_grad(p).new_zeros((slots, *p.shape[1:])) for p in parameters)
        self._grads = dict(zip(names, grads, strict=True))
        """Their main gradients, likewise."""
        self._coming: tuple[Tensor, Wait] | None = None
        """Weights that have left for here."""
        self._current = False
        """Whether weights have left since they changed."""
        self._places: Tensor | None = None
        """[experts]: numbers of the places to which rows of the tokens here go; None: each expert
        is at the place of its number."""

    @property
    def map(self) -> ExpertMap:
        """The map in force."""
        return self.owners.map

    @property
    def owned(self) -> int:
        """Experts that each rank owns."""
        return self.map.experts // self.map.ranks

    @property
    def replicas_per_rank(self) -> int:
        """Places of each rank for copies."""
        return max(map(len, self.map.replicas))

    @property
    def num_slots(self) -> int:
        """Places of all ranks."""
        return self.map.ranks * (self.owned + self.replicas_per_rank)

    def set_map(self, after: ExpertMap) -> None:
        """Go on with another map, between steps. All ranks call it."""
        self.mark_stale()
        self.owners.map = after
        found = [self._place_of(expert) for expert in range(after.experts)]
        self._places = None
        if found != list(range(after.experts)):
            places = torch.tensor(found, dtype=torch.int16)
            self._places = to_device(places, self._parameters[0].device)

    def _place_of(self, expert: int) -> int:
        """To which rows for an expert go."""
        of = self.map
        goal = destinations(of.holders(expert), of.ranks, self._node)[self._rank]
        first = goal * (self.owned + self.replicas_per_rank)
        if of.owners[expert] == goal:
            return first + of.owned(goal).index(expert)
        return first + self.owned + of.replicas[goal].index(expert)

    def to_slots(self, choice: Tensor) -> Tensor:
        """Numbers of places in the place of those of experts, of what
        :func:`~megapipe.layers.moe.routing.route_tokens` found; dropped choices stay below 0."""
        if self._places is None:
            return choice
        there = self._places[choice.clamp(min=0).long()]
        return torch.where(choice < 0, choice, there)

    def mark_stale(self) -> None:
        """Weights have changed, or are about to: copies are those of old ones. All ranks call
        it."""
        self._arrive()
        self._current = False

    def start_broadcast(self) -> None:
        """Send the weights of the experts here to the ranks with copies, if they have changed since
        that was done; they are whole. All ranks call it."""
        if self.replicas_per_rank and not self._current:
            values = [p.detach() for p in self._parameters]
            self._coming = self._exchange(values, self._leaving(), self._staying())
            self._current = True

    def weights(self, parameter: Parameter) -> Tensor:
        """[slots, ...]: those of the copies, which have come."""
        self.wait_broadcast()
        return self._weights[spec_of(parameter).name]

    def wait_broadcast(self) -> None:
        """Wait for the weights of the copies here, which leave if they have not. All ranks call
        it."""
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
        """Of each expert here that is on several ranks, yield the weights [...] of each parameter.
        Copies are those of the last update when :meth:`wait_broadcast` has returned."""
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
        """Yield what lasts: weights and gradients of copies, and where rows go."""
        yield from (*self._weights.values(), *self._grads.values())
        if self._places is not None:
            yield self._places

    def main_grads(self, parameter: Parameter) -> list[Tensor]:
        """Main gradients of the experts in all places here, each to be added to."""
        return [*main_grad(parameter), *self._grads[spec_of(parameter).name]]

    def zero_grad(self) -> None:
        """Begin a step."""
        for grad in self._grads.values():
            grad.zero_()

    def start_grad_return(self) -> tuple[Tensor, Wait] | None:
        """Send the step's gradients of copies to the owners of their experts. All ranks call it."""
        if not self.replicas_per_rank:
            return None
        return self._exchange(list(self._grads.values()), self._staying(), self._leaving())

    def add_returned_grads(self, received: Tensor) -> None:
        """Add gradients of copies, which have come home, to those of the experts here."""
        owned = [expert for own in self._leaving() for expert in own]
        for number, tensors in self._parts(received, owned):
            for parameter, values in zip(self._parameters, tensors, strict=True):
                main_grad(parameter)[number] += values

    def _leaving(self) -> list[list[int]]:
        """By rank, which of the experts that this one owns it has copies of."""
        own = self.map.owned(self._rank)
        return [[own.index(e) for e in each if e in own] for each in self.map.replicas]

    def _staying(self) -> list[list[int]]:
        """By rank, which of the copies here are of experts that it owns."""
        owners = [self.map.owners[expert] for expert in self.map.replicas[self._rank]]
        ranks = range(self.map.ranks)
        return [[i for i, owner in enumerate(owners) if owner == rank] for rank in ranks]

    def _exchange(
        self, values: Sequence[Tensor], out: Sequence[Sequence[int]], home: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Wait]:
        """Begin to send each rank the experts `out` of these values [experts, ...], and to receive
        as many as `home` has."""
        size = sum(each[0].numel() for each in values)
        sent = [each[i].flatten() for own in out for i in own for each in values]
        flat = torch.cat(sent) if sent else values[0].new_empty(0)
        return start_all_to_all(flat, self._ep, self._lengths(out, size), self._lengths(home, size))

    def _lengths(self, of_ranks: Sequence[Sequence[int]], size: int) -> list[int]:
        """By member of the group: those of other parts get nothing."""
        parts = range(self._etp)
        return [len(own) * size * (part == self._part) for own in of_ranks for part in parts]

    def _parts(
        self, received: Tensor, numbers: Sequence[int]
    ) -> Iterator[tuple[int, list[Tensor]]]:
        """Of each of these experts, one after the other, its values by parameter."""
        shapes = [p.shape[1:] for p in self._parameters]
        sizes = [shape.numel() for shape in shapes]
        for number, values in zip(numbers, received.split(sum(sizes)), strict=bool(numbers)):
            parts = values.split(sizes)
            yield number, [p.view(shape) for p, shape in zip(parts, shapes, strict=True)]
