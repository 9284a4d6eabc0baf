"""Routers: they compute scores from the experts' logits, and choose the experts of each token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from megapipe.errors import ConfigError, MegapipeError
from megapipe.util.user_code import FAILURES, UserCode, is_user_code


class Router(ABC):
    """Base class of routers, which score experts and choose the experts of each token.
    ``model.moe.score_function`` may name a user-defined one; routers are made without arguments."""

    sums_to_one: ClassVar[bool] = False
    """Whether the scores of a token sum to 1."""

    @abstractmethod
    def scores(self, logits: Tensor) -> Tensor:
        """Return positive scores [tokens, experts] from `logits` of the same shape, in fp32 or
        fp64. The scores of chosen experts are the experts' weights."""

    def scores_grad(self, grad: Tensor, logits: Tensor, scores: Tensor) -> Tensor:
        """Return the gradient of `logits` for the gradient `grad` of `scores`, by autograd."""
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            (found,) = torch.autograd.grad(self.scores(leaf), leaf, grad)
        return found

    def choose(self, scores: Tensor, top_k: int) -> Tensor:
        """Return the experts of each token [tokens, top_k], int64, best first, without repetition.

        `scores` include the experts' biases (``model.moe.bias_update_rate``); scores of experts
        outside of a token's groups are -inf. By default the largest scores win.
        """
        return largest(scores, top_k)


class Softmax(Router):
    """Softmax over the experts of a token."""

    sums_to_one = True

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def scores_grad(self, grad: Tensor, logits: Tensor, scores: Tensor) -> Tensor:
        return scores * (grad - (grad * scores).sum(-1, keepdim=True))


class Sigmoid(Router):
    """Sigmoid of each expert's logit (DeepSeek-V3, 2412.19437)."""

    def scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def scores_grad(self, grad: Tensor, logits: Tensor, scores: Tensor) -> Tensor:
        return grad * scores * (1 - scores)


ROUTERS: dict[str, type[Router]] = {"softmax": Softmax, "sigmoid": Sigmoid}


def make_router(name: str) -> Router:
    """Make the router that ``model.moe.score_function`` names. Raises :class:`ConfigError`."""
    return _Checked(name) if is_user_code(name) else ROUTERS[name]()


class _Checked(Router):
    """A user-defined router; its failures and wrong results raise a one-line error."""

    def __init__(self, name: str) -> None:
        code = UserCode(name, what="model.moe.score_function=", error=ConfigError, kind="class")
        self._code = code
        if not (isinstance(code.function, type) and issubclass(code.function, Router)):
            raise code.problem("it is not a class derived from megapipe.layers.moe.routers.Router")
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
        """Raise an error if an expert does not exist, or if a token has an expert twice."""
        low, high = (int(end) for end in found.aminmax())
        if low < 0 or high >= experts:
            raise self._code.problem(
                f"choose returns experts {low} to {high}: expected 0 to {experts - 1}"
            )
        ordered = found.sort(-1).values
        if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            raise self._code.problem(
                "choose returns an expert twice for a token: expected different experts"
            )

    def _call(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, *arguments: object
    ) -> Tensor:
        try:
            found: Tensor = getattr(self._router, name)(*arguments)
        except (RuntimeError, MegapipeError):  # torch's own errors, e.g. out of memory
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
    """Return the columns of the k largest values of each row. Ties go to the lower column, unlike
    with torch.topk, which may return any."""
    rest, found = values.clone(), []
    for _ in range(k):
        found.append(rest.argmax(-1, keepdim=True))
        rest.scatter_(-1, found[-1], -torch.inf)
    return torch.cat(found, -1)
