"""Names of actions for profilers: in torch's traces and, on a GPU, as NVTX ranges."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.profiler import record_function

from megapipe.schedule.program import Action, ActionKind


def name_of(action: Action) -> str:
    """Return an action's name, such as ``F stage 1 micro-batch 3`` or ``send I of stage 2
    micro-batch 0 to rank 1``. Slices from the second on are named too."""
    stage = f"stage {action.stage}"
    piece = f"{stage} micro-batch {action.microbatch}"
    if action.slice:
        piece += f" slice {action.slice}"
    if action.do == ActionKind.COMPUTE:
        return f"{action.kind.name} {piece}"
    if action.do == ActionKind.SEND:
        return f"send {action.kind.name} of {piece} to rank {action.peer}"
    if action.do == ActionKind.RECV:
        return f"receive {action.kind.name} of {piece} from rank {action.peer}"
    return f"{action.do.name.lower()} {stage}"


def named(action: Action, call: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Wrap `call`, which runs `action`, in a profiler range with the action's name."""
    name = name_of(action)
    on_gpu = device.type == "cuda"

    def named_call() -> None:
        with record_function(name), torch.cuda.nvtx.range(name) if on_gpu else nullcontext():
            call()

    return named_call
