"""The two sides that are timed: megapipe's step, and Hugging Face's with the usual loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ladder.sizes import Settings, Size
from megapipe import TrainStep
from megapipe.distributed.mesh import Grid, ParallelMesh
from megapipe.layers.activation_policy import padded_vocabulary
from megapipe.layers.parameter import LocalParameter
from megapipe.model.gpt.hf.config import config_to_hf

POOL = 4_000_037
"""Random numbers from which initial weights are filled: more than any period that matters."""


class Side(ABC):
    """A model in training on one device."""

    rows: int = 1
    """Sequences of a micro-batch from now on."""
    state: str
    """Types of weights and optimizer state."""

    @abstractmethod
    def step(self) -> float:
        """Run one optimizer step over all its micro-batches; return the loss."""


class Ours(Side):
    """megapipe's :class:`TrainStep`.

    It is configured for `most` rows; a micro-batch may have fewer, so one instance serves a search
    for the largest that fits. `initial` weights are quickly made ones.
    """

    def __init__(
        self,
        size: Size,
        mesh: ParallelMesh,
        most: int,
        changes: Settings | None = None,
    ) -> None:
        self.size = size
        self.rows = most
        config, layout = size.config(most, mesh.device, changes)
        optimizer = config.optimizer
        self.state = f"{config.model.dtype} weights"
        if config.model.dtype == "bf16" and optimizer.master_weights == "fp32":
            self.state += ", fp32 masters"
        self.state += f", {optimizer.state_dtype} state"
        self.train = TrainStep(config, layout, mesh, initial=QuickWeights())
        self._sources: dict[int, OneBatch] = {}
        self._count = 0

    def step(self, *, record: bool = False) -> float:
        """Run a step; with `record`, :meth:`TrainStep.records` then has the time of each
        operation."""
        if self.rows not in self._sources:
            self._sources = {self.rows: OneBatch(*self.size.batch(self.rows))}
        (result,) = self.train.train(self._count, self._sources[self.rows], record=record)
        self._count += 1
        return result.loss


class OneBatch:
    """Rows for a :class:`TrainStep`, the same in every micro-batch. Another number of rows needs
    another object, as steps are read ahead."""

    def __init__(self, tokens: Tensor, labels: Tensor) -> None:
        self._rows = tokens, labels, torch.ones(labels.shape, dtype=torch.bool)

    def __call__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        return self._rows


class QuickWeights:
    """Normally distributed weights, the same numbers over and over: those that megapipe draws take
    a minute for 7 billion parameters. They are not zeros, on which a GPU is faster."""

    def __init__(self) -> None:
        self.pool = torch.randn(POOL, generator=torch.Generator().manual_seed(0))
        self.next = 0

    def __call__(self, spec: LocalParameter, out: Tensor) -> None:
        if spec.std is None:
            out.fill_(spec.fill)
            return
        flat = out.view(-1)
        done = 0
        while done < flat.numel():
            part = self.pool[self.next : self.next + flat.numel() - done]
            torch.mul(part, spec.std, out=flat[done : done + part.numel()])
            done += part.numel()
            self.next = (self.next + part.numel()) % POOL
        out[spec.shape[0] :].zero_()  # the vocabulary's padding


Precision = Literal["fp32", "mixed", "bf16"]


class HuggingFace(Side):
    """A transformers model in the usual loop: SDPA, grouped experts, fused AdamW, clipping.

    Precision "mixed": weights and activations in bf16, updates of fp32 master weights and state, as
    in megapipe; under autocast the residual stream would be fp32, which is slower. "bf16": weights,
    gradients and state, if master weights do not fit. The vocabulary is padded as megapipe's is.
    `compile` compiles the layers, which share one compilation, and the loss.
    """

    def __init__(
        self, size: Size, device: torch.device, precision: Precision, *, compile: bool
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.size = size
        self.device = device
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        self.state = {
            "fp32": "fp32 weights, fp32 state",
            "mixed": "bf16 weights, fp32 masters, fp32 state",
            "bf16": "bf16 weights, bf16 state",
        }[precision]
        padded = padded_vocabulary(size.family["vocab_size"], 1)
        experts = (
            {} if size.model.moe.num_experts is None else {"experts_implementation": "grouped_mm"}
        )
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config_to_hf(size.model, vocab_size=padded, **experts),
                attn_implementation="sdpa",
                dtype=dtype,
            )
        self.model: nn.Module = model.train()
        if compile:
            compile_parts(model)
        self.weights = list(model.parameters())
        self.masters = self.weights
        if precision == "mixed":
            self.masters = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.masters if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in self.masters if p.dim() == 1], "weight_decay": 0.0},
            ],
            lr=1e-4,
            betas=(0.9, 0.95),
            fused=True,
        )
        self._batch: tuple[Tensor, Tensor] = size.batch(1)

    def step(self) -> float:
        if len(self._batch[0]) != self.rows:
            self._batch = self.size.batch(self.rows)
        for weight in self.weights:
            weight.grad = None
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for _ in range(self.size.microbatches):
            tokens, labels = (tensor.to(self.device) for tensor in self._batch)
            loss = self.model(tokens, labels=labels, shift_labels=labels, use_cache=False).loss
            (loss / self.size.microbatches).backward()
            total += loss.detach()
        if self.masters is not self.weights:
            self._hand_over()
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        if self.masters is not self.weights:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.masters)
        return float(total) / self.size.microbatches

    def _hand_over(self) -> None:
        """Move gradients from the weights to the master weights; all never exist twice."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None


def compile_parts(model: Any) -> None:
    """Compile each layer and the loss."""
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    for layer in layers:
        layer.compile(dynamic=False)
    model.loss_function = torch.compile(model.loss_function, dynamic=False)


def single_mesh(device: torch.device, *, timeout_s: float = 60.0) -> ParallelMesh:
    """Make the mesh of a job of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return ParallelMesh(Grid(), device=device, timeout_s=timeout_s)
