"""Other systems on another device, or in another type, than they are written for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _CudaIsTheCpu(TorchFunctionMode):
    """Puts tensors on the CPU that are created on a GPU; they report that they are on a GPU."""

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
    """Run programs on the CPU that expect a GPU and only allocate memory on it."""
    cpu = torch.device("cpu")
    with mock.patch.object(torch.cuda, "current_device", return_value=cpu), _CudaIsTheCpu():
        yield


class InDouble(TorchFunctionMode):
    """Computes in fp64 what is requested in fp32: norms, softmax, losses and rotary angles. Models
    use fp32 for these in any type of their own."""

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
