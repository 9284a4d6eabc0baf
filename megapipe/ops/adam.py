"""The update of Adam and AdamW over flat tensors: torch's fused kernel, or apex's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from megapipe.ops.probe import Candidate, Unavailable, agree, load_module, needs_cuda, small_data

CHUNK = 2048 * 32
"""Elements per block of apex's multi-tensor kernels: apex's default."""


class AdamStep(NamedTuple):
    """Hyperparameters of one update; `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    """Whether the decay acts on the weights (AdamW) or on the gradient (Adam)."""
    step: int


AdamKernel = Callable[[Tensor, Tensor, Tensor, Tensor, AdamStep], None]
"""Function (weights, gradient, exp_avg, exp_avg_sq, step) that updates weights and moments in
place."""


def torch_adam(
    master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, now: AdamStep
) -> None:
    done = torch.full((), now.step - 1.0, dtype=torch.float32, device=master.device)
    adam(
        [master],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [done],
        fused=True,
        decoupled_weight_decay=now.decoupled,
        amsgrad=False,
        beta1=now.beta1,
        beta2=now.beta2,
        lr=now.lr,
        weight_decay=now.weight_decay,
        eps=now.eps,
        maximize=False,
    )


def apex_adam(extension: Any) -> AdamKernel:
    """Return the kernel of apex's FusedAdam; `extension` is apex's module amp_C."""

    def update(
        master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, now: AdamStep
    ) -> None:
        extension.multi_tensor_adam(
            CHUNK,
            torch.zeros(1, dtype=torch.int32, device=master.device),  # no-op flag: not set
            [[grad], [master], [exp_avg], [exp_avg_sq]],
            now.lr,
            now.beta1,
            now.beta2,
            now.eps,
            now.step,
            int(now.decoupled),
            1,  # bias correction
            now.weight_decay,
        )

    return update


def candidates(*, device: torch.device, dtype: torch.dtype) -> list[Candidate[AdamKernel]]:
    """Return the kernels in order of preference: apex's, then torch's. `dtype`: type of master
    weights and optimizer states."""

    def apex() -> AdamKernel:
        needs_cuda(device)
        if dtype != torch.float32:
            raise Unavailable("updates in fp32, and the model is fp64")
        return apex_adam(load_module("amp_C", "NVIDIA apex"))

    def results(kernel: AdamKernel, precision: torch.dtype) -> Sequence[Tensor]:
        drawn = small_data([(100,)] * 4, dtype, precision, device)
        master, grad, mean, square = (x.detach() for x in drawn)
        square.square_()
        for decoupled in (True, False):
            now = AdamStep(1e-2, 0.9, 0.95, 1e-8, 0.1, decoupled, step=3)
            kernel(master, grad.clone(), mean, square, now)
        return [master, mean, square]

    def check(kernel: AdamKernel) -> None:
        agree(kernel, torch_adam, results, dtype)

    return [
        Candidate("apex", apex, check, "apex"),
        Candidate("torch", lambda: torch_adam),
    ]
