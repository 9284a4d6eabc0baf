"""torch.compile without its compiler: graphs are traced, with their backward, and run as is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def traced_blocks() -> Iterator[list[Any]]:
    """Trace compiled blocks without compiling them; yield the list of their graphs."""
    torch.compiler.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    def compiler(function: Any) -> Any:
        return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)

    with mock.patch("megapipe.assembly.kernels.torch_compile", compiler):
        yield graphs
