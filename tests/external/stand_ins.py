"""Other systems on another device, or in another type, than the one that they are written for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _CudaIsTheCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU are on the CPU, and say that they are on a GPU."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if str(given.get("device")).startswith("cuda"):
            given["device"] = "cpu"
        if function is Tensor.type and len(args) == 1:
            return "torch.cuda.FloatTensor"
        if function is Tensor.cuda:
            return args[0]
        return function(*args, **given)


@contextmanager
def cuda_is_the_cpu() -> Iterator[None]:
    """For programs that expect a GPU, and ask for no more than memory on it."""
    cpu = torch.device("cpu")
    with mock.patch.object(torch.cuda, "current_device", return_value=cpu), _CudaIsTheCpu():
        yield


class InDouble(TorchFunctionMode):
    """What is asked for in fp32 is in fp64: norms, softmax, losses and rotary angles, for which
    models change to fp32 whatever their own type."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        def wide(given: Any) -> Any:
            return torch.float64 if given is torch.float32 else given

        if function is Tensor.float:
            function = Tensor.double
        named = {key: wide(value) for key, value in (kwargs or {}).items()}
        return function(*map(wide, args), **named)
