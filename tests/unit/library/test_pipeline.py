"""A pipeline of plain modules gives the loss and the gradients of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megapipe.errors import ConfigError, LaunchError
from megapipe.library.pipeline import Pipeline
from megapipe.schedule.generators import build
from tests.unit.library.models import VOCABULARY, WIDTH, batch, gradients, layers, run

SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {}),
    ("gpipe", {"ranks": 3}),
    ("zb_h1", {"ranks": 4}),
    ("interleaved_1f1b", {"chunks": 2}),
    ("zb_v", {}),
    ("chimera", {}),
    ("chimera", {"ranks": 4, "microbatches": 8}),
    ("dualpipe", {"microbatches": 8}),
    ("gems", {}),
    ("hanayo", {"chunks": 2}),
]


def plain(
    modules: list[nn.Module], loss: Callable[[Tensor], Tensor], *inputs: Tensor
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a batch and the gradients, in plain torch."""
    value = loss(run(modules, *inputs))
    value.backward()
    return value.item(), gradients(modules)


def token_loss(labels: Tensor, mask: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    def loss(logits: Tensor) -> Tensor:
        keep = torch.ones_like(labels).bool() if mask is None else mask
        return functional.cross_entropy(logits[keep], labels[keep])

    return loss


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert (found[name] - grad).abs().max() <= 1e-10 * (1 + grad.abs().max()), name


@pytest.mark.parametrize(("schedule", "options"), SCHEDULES)
def test_loss_and_gradients_are_those_of_plain_torch(
    schedule: str, options: dict[str, Any]
) -> None:
    tokens, labels, mask = batch(16)
    wanted, grads = plain(layers(), token_loss(labels, mask), tokens)
    modules = layers()
    pipe = Pipeline(modules, schedule=schedule, **options)
    assert pipe.step((tokens, labels, mask)) == pytest.approx(wanted, abs=1e-10)
    assert_same(gradients(modules), grads)
    assert max(grad.abs().max() for grad in grads.values()) > 1e-3


def test_any_optimizer_of_torch_trains_with_it() -> None:
    tokens, labels, _ = batch()
    modules = layers()
    pipe = Pipeline(modules, layout="L*3 | L*6")
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        losses.append(pipe.step((tokens, labels)))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
    with torch.no_grad():
        now = token_loss(labels)(run(modules, tokens)).item()
    assert pipe.step((tokens, labels)) == pytest.approx(now, abs=1e-10)


def test_gradients_are_added_as_backward_adds_them() -> None:
    tokens, labels, _ = batch()
    modules = layers()
    pipe = Pipeline(modules)
    pipe.step((tokens, labels))
    once = gradients(modules)
    pipe.step((tokens, labels))
    assert_same(gradients(modules), {name: 2 * grad for name, grad in once.items()})


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_of_one_s_own_is_that_of_the_batch(reduction: Any) -> None:
    """Two inputs and floating-point targets go into a first module without parameters."""

    class Add(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    def make() -> list[nn.Module]:
        torch.manual_seed(1)
        return [Add(), nn.Linear(WIDTH, WIDTH).double(), nn.Tanh(), nn.Linear(WIDTH, 2).double()]

    a, b, y = torch.randn(3, 6, WIDTH, dtype=torch.float64)
    criterion = nn.MSELoss(reduction=reduction)
    wanted, grads = plain(make(), lambda out: criterion(out, y[:, :2]), a, b)
    modules = make()
    pipe = Pipeline(
        modules, microbatches=3, loss=criterion, reduction=reduction, layout=[1, 1, 2], ranks=3
    )
    assert pipe.step(((a, b), y[:, :2])) == pytest.approx(wanted, abs=1e-10)
    assert_same(gradients(modules), grads)


def test_modules_that_share_a_parameter_and_frozen_ones() -> None:
    def make() -> list[nn.Module]:
        modules = layers()
        modules[-1].weight = modules[0].weight
        modules[4].requires_grad_(False)
        return modules

    tokens, labels, _ = batch()
    wanted, grads = plain(make(), token_loss(labels), tokens)
    modules = make()
    pipe = Pipeline(modules, schedule="zb_h1", ranks=3)
    assert pipe.step((tokens, labels)) == pytest.approx(wanted, abs=1e-10)
    assert_same(gradients(modules), grads)


def test_random_numbers_follow_from_seed_step_and_micro_batch() -> None:
    def first_two(seed: int, **options: Any) -> list[float]:
        pipe = Pipeline(layers(dropout=0.5), seed=seed, **options)
        return [pipe.step(batch()) for _ in range(2)]

    wanted = first_two(1)
    assert wanted == first_two(1, schedule="gpipe", ranks=3)
    assert wanted == first_two(1, schedule="zb_v")
    assert wanted[0] != wanted[1]
    assert wanted[0] != first_two(2)[0]


def test_a_step_leaves_torch_s_generator_as_it_was() -> None:
    pipe = Pipeline(layers(dropout=0.5))
    state = torch.get_rng_state()
    pipe.step(batch())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_schedule_may_be_given_as_data() -> None:
    schedule = build("zb_h1", ranks=3, microbatches=4)
    pipe = Pipeline(layers(), schedule=schedule)
    assert pipe.schedule is schedule
    assert len(pipe.stage_specs) == 3


def test_a_step_that_failed_leaves_nothing_to_the_next() -> None:
    class Touchy(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 3:
                raise ValueError("not this one")
            return x

    modules = [*layers()[:-1], Touchy(), layers()[-1]]
    pipe = Pipeline(modules)
    with pytest.raises(ValueError, match="not this one"):
        pipe.step(batch())
    for parameter in pipe.parameters():
        parameter.grad = None
    tokens, labels, mask = batch()
    wanted, grads = plain(layers(), token_loss(labels, mask), tokens)
    assert pipe.step((tokens, labels, mask)) == pytest.approx(wanted, abs=1e-10)
    assert_same(dict(zip(grads, gradients(modules).values(), strict=True)), grads)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "1f2b"}, "schedule '1f2b' is unknown; did you mean"),
        ({"schedule": "seq1f1b"}, "cuts sequences into"),
        ({"ranks": 12}, "modules: 9 for 12 stages of schedule 1f1b: expected at least one"),
        ({"layout": "L*3 | L*3"}, "places 6 layers, but the model has 9"),
        ({"layout": [3, 3, 3]}, "has 3 stages: expected 2, as schedule 1f1b has"),
        ({"reduction": "max"}, "reduction='max': expected mean or sum"),
        ({"loss": 3}, "loss= is a int: expected a function"),
        ({"modules": []}, "modules: an empty list: expected a list of nn.Module"),
        ({"modules": nn.Tanh()}, "modules: Tanh: expected a list of nn.Module"),
        ({"modules": [nn.Tanh(), "x"]}, r"modules\[1\] is a str, not an nn.Module"),
        ({"modules": [nn.Tanh(), nn.Tanh()]}, "none has a parameter with requires_grad=True"),
        ({"schedule": build("1f1b", ranks=2, microbatches=3)}, "has 3 micro-batches: expected 4"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    options = {"modules": layers(), **options}
    with pytest.raises(ConfigError, match=words) as caught:
        Pipeline(options.pop("modules"), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (batch(10), "10 samples do not divide into 4 micro-batches of schedule 1f1b: expected a "),
        (batch(0), "0 samples do not divide"),
        ((batch()[0], batch(4)[1]), r"tensors of \[4, 8\] samples: expected equally many"),
        (batch()[0], r"expected \(inputs, targets\) or"),
        ((batch()[0], [3]), "it has a int: expected tensors"),
        ((*batch(), batch()[0]), "3 targets for the cross-entropy of tokens"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_in_one_line(given: Any, words: str) -> None:
    pipe = Pipeline(layers())
    with pytest.raises(ConfigError, match=words) as caught:
        pipe.step(given)
    assert "\n" not in str(caught.value)


def test_modules_that_pass_on_what_has_no_gradient_are_refused() -> None:
    class Count(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x % 3

    class Named(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": x.double()}

    inner = layers()
    with pytest.raises(ConfigError, match="module 0 returns only integers"):
        Pipeline([Count(), *inner], layout=[1, 9]).step(batch())
    with pytest.raises(ConfigError, match="module 0 returns dict: expected a tensor"):
        Pipeline([Named(), *inner], layout=[1, 9]).step(batch())
    with pytest.raises(ConfigError, match=r"loss= returns \[2, 5, 11\]: expected a tensor of one"):
        Pipeline(inner, loss=lambda y, labels, mask: y).step(batch())
    assert inner[-1].out_features == VOCABULARY


def test_over_ranks_there_has_to_be_a_process_group() -> None:
    with pytest.raises(LaunchError, match="needs torch's default process group"):
        Pipeline(layers(), distributed=True)
