"""Routers: from the logits of experts to their scores, and to the experts of a token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from megapipe.errors import ConfigError, MegapipeError
from megapipe.util.user_code import FAILURES, UserCode, is_user_code


class Router(ABC):
    """Scores experts and chooses those of each token. Base of every router, also of those that
    ``model.moe.scores`` names; they are made without arguments."""

    sums_to_one: ClassVar[bool] = False
    """Whether the scores of a token sum to 1."""

    @abstractmethod
    def scores(self, logits: Tensor) -> Tensor:
        """Return scores [tokens, experts] above 0, the weights of those that are chosen, from
        `logits` of this shape, in fp32 or fp64."""

    def scores_grad(self, grad: Tensor, logits: Tensor, scores: Tensor) -> Tensor:
        """Return the gradient of `logits` from that of `scores`, by default by autograd."""
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            (found,) = torch.autograd.grad(self.scores(leaf), leaf, grad)
        return found

    def choose(self, scores: Tensor, top_k: int) -> Tensor:
        """Return the experts of each token [tokens, top_k], int64, no one twice, best first.

        To `scores` the biases of experts are added (``model.moe.bias_rate``); those of experts
        outside of a token's groups are -inf. By default those with the largest scores.
        """
        return largest(scores, top_k)


class Softmax(Router):
    """Scores that are shares of a token."""

    sums_to_one = True

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def scores_grad(self, grad: Tensor, logits: Tensor, scores: Tensor) -> Tensor:
        return scores * (grad - (grad * scores).sum(-1, keepdim=True))


class Sigmoid(Router):
    """Scores of each expert by itself (DeepSeek-V3, 2412.19437)."""

    def scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def scores_grad(self, grad: Tensor, logits: Tensor, scores: Tensor) -> Tensor:
        return grad * scores * (1 - scores)


ROUTERS: dict[str, type[Router]] = {"softmax": Softmax, "sigmoid": Sigmoid}


def make_router(name: str) -> Router:
    """Make the router that ``model.moe.scores`` names. Raises :class:`ConfigError`."""
    return _Checked(name) if is_user_code(name) else ROUTERS[name]()


class _Checked(Router):
    """A user-defined router, whose results and failures become an error of one line."""

    def __init__(self, name: str) -> None:
        code = UserCode(name, what="model.moe.scores=", error=ConfigError, kind="class")
        self._code = code
        if not (isinstance(code.function, type) and issubclass(code.function, Router)):
            raise code.problem("it is no class derived from megapipe.layers.moe.routers.Router")
        for method in sorted(code.function.__abstractmethods__):
            raise code.problem(f"it has no method {method}")
        self._router: Router = code.call({}, ())
        self.sums_to_one = self._router.sums_to_one  # type: ignore[misc]

    def scores(self, logits: Tensor) -> Tensor:
        return self._call("scores", logits.shape, logits.dtype, logits)

    def scores_grad(self, grad: Tensor, logits: Tensor, scores: Tensor) -> Tensor:
        return self._call("scores_grad", logits.shape, logits.dtype, grad, logits, scores)

    def choose(self, scores: Tensor, top_k: int) -> Tensor:
        shape = len(scores), top_k
        found = self._call("choose", shape, torch.int64, scores, top_k)
        if found.device.type == "cpu" and found.numel():
            self._check_experts(found, scores.shape[1])
        return found

    def _check_experts(self, found: Tensor, experts: int) -> None:
        """Refuse experts that there are not, and one that a token has twice."""
        low, high = (int(end) for end in found.aminmax())
        if low < 0 or high >= experts:
            raise self._code.problem(
                f"choose returns experts {low} to {high}: expected 0 to {experts - 1}"
            )
        ordered = found.sort(-1).values
        if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            raise self._code.problem("choose returns an expert twice for a token: expected others")

    def _call(self, name: str, shape: Sequence[int], dtype: torch.dtype, *given: object) -> Tensor:
        try:
            found: Tensor = getattr(self._router, name)(*given)
        except (RuntimeError, MegapipeError):  # torch's own, such as memory that is used up
            raise
        except FAILURES as error:
            raise self._code.failed(error) from error
        has = getattr(found, "shape", None), getattr(found, "dtype", None)
        if has != (tuple(shape), dtype):
            returned = type(found).__name__ if has[0] is None else f"{list(has[0])} of {has[1]}"
            raise self._code.problem(
                f"{name} returns {returned}: expected {list(shape)} of {dtype}"
            )
        return found


def largest(values: Tensor, k: int) -> Tensor:
    """Columns of the k largest values of each row, the lower one first where they are equal: of
    these torch.topk gives any, and argmax the first."""
    rest, found = values.clone(), []
    for _ in range(k):
        found.append(rest.argmax(-1, keepdim=True))
        rest.scatter_(-1, found[-1], -torch.inf)
    return torch.cat(found, -1)
