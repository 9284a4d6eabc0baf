"""User models for tests, and their training in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.config.update_rules import AdamOptions
from megapipe.layers import ColumnLinear, Linear, RowLinear
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.model.modules.units import ModelFactory, parameter_places
from megapipe.plan.measurements import BY_UNITS
from megapipe.testing import World, run_world
from tests.parity.cases import Case, batch_of, configure
from tests.parity.mixture import Told
from tests.parity.outcome import Outcome, assemble
from tests.parity.ranks import train
from tests.parity.reference import Params, Step

WIDTH = 8


class Mixer(nn.Module):
    """A causal convolution and an MLP, added to x [b, s, w]; megapipe has no such layer."""

    def __init__(self, up: type[nn.Linear], down: type[nn.Linear]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)
        self.up = up(WIDTH, 4 * WIDTH)
        self.down = down(4 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        past = functional.pad(self.norm(x).transpose(1, 2), (2, 0))
        mixed = self.conv(past).transpose(1, 2)
        return x + self.scale * self.down(functional.gelu(self.up(mixed)))


class Attending(nn.Module):
    """Attention with torch's kernels, added to x [b, s, w]: causal, by a mask, with fewer key
    heads, and with dropout."""

    def __init__(self, up: type[nn.Linear], down: type[nn.Linear]) -> None:
        super().__init__()
        self.qkv = up(WIDTH, 3 * WIDTH)
        self.out = down(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, 4, -1).permute(2, 0, 3, 1, 4)  # [b, heads, s, d]
        attend = functional.scaled_dot_product_attention
        past = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
        y = attend(q, k, v, is_causal=True) + attend(q, k, v, attn_mask=past)
        y = y + attend(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True)
        y = y + attend(q, k, v, is_causal=True, dropout_p=0.1 * self.training)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Memory(nn.Module):
    """x -> (x, memory that every later layer may read, integers without gradients)."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        return x, self.look(x).cumsum(1), positions


class Reader(nn.Module):
    """(x, memory, positions) -> the same with another x."""

    def __init__(self) -> None:
        super().__init__()
        self.read = Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        mean = memory / (1 + positions).unsqueeze(-1)
        return x + torch.tanh(self.read(x * mean)), memory, positions


class Forget(nn.Module):
    """(x, memory, positions) -> logits; the memory itself is not used."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, vocab_size)

    def forward(self, x: Tensor, memory: Tensor, positions: Tensor) -> Tensor:
        return self.head(x)


class OneHot(nn.Module):
    """Tokens as vectors, without parameters."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.register_buffer("words", torch.eye(vocab_size, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words[tokens]  # type: ignore[index, no-any-return]


class Ignore(nn.Module):
    """A layer that takes nothing from x except its size."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.start.expand(*x.shape[:2], WIDTH).cumsum(1)


class Twice(nn.Module):
    """One matrix before and after a function, added to x."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Scaled(nn.Module):
    """A layer whose result is scaled."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.inner(x)


def squares(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Return a loss: the sum of the unmasked tokens' squared distances from labels."""
    wanted = functional.one_hot(labels, logits.shape[-1]).to(logits.dtype)
    return ((logits - wanted).square().sum(-1) * mask).sum()


def _layers(
    vocab_size: int, depth: int, up: type[nn.Linear], down: type[nn.Linear], head: type[nn.Linear]
) -> list[nn.Module]:
    inner = [Mixer(up, down) for _ in range(depth - 2)]
    return [nn.Embedding(vocab_size, WIDTH), *inner, head(WIDTH, vocab_size)]


def plain(vocab_size: int, depth: int) -> list[nn.Module]:
    """Return layers without anything of megapipe."""
    return _layers(vocab_size, depth, nn.Linear, nn.Linear, nn.Linear)


def attending(vocab_size: int, depth: int) -> list[nn.Module]:
    """Return layers with attention."""
    inner = [Attending(Linear, Linear) for _ in range(depth - 2)]
    return [nn.Embedding(vocab_size, WIDTH), *inner, Linear(WIDTH, vocab_size)]


def split(vocab_size: int, depth: int) -> list[nn.Module]:
    """Return layers whose weight gradients wait for W."""
    return _layers(vocab_size, depth, Linear, Linear, Linear)


def parallel(vocab_size: int, depth: int) -> list[nn.Module]:
    """Return layers that tensor parallelism splits."""
    return _layers(vocab_size, depth, ColumnLinear, RowLinear, Linear)


def tied(vocab_size: int, depth: int) -> list[nn.Module]:
    """Return layers with one matrix for the embedding and the head."""
    layers = split(vocab_size, depth)
    layers[-1].weight = layers[0].weight
    return layers


def shared(vocab_size: int, depth: int) -> list[nn.Module]:
    """Return layers that share: two parameters of the first and the last, one used twice by a
    layer."""
    first, last = Scaled(nn.Embedding(vocab_size, WIDTH)), Scaled(nn.Linear(WIDTH, vocab_size))
    last.inner.weight, last.scale = first.inner.weight, first.scale
    return [first, *(Twice() for _ in range(depth - 2)), last]


def tuples(vocab_size: int, depth: int) -> list[nn.Module]:
    """Return layers that pass three tensors: one of integers, and one that the last layer
    ignores."""
    readers = [Reader() for _ in range(depth - 3)]
    return [nn.Embedding(vocab_size, WIDTH), Memory(), *readers, Forget(vocab_size)]


def severed(vocab_size: int, depth: int) -> list[nn.Module]:
    """Return layers: the first has no parameters, and one has an input without gradient."""
    mixers = [Mixer(Linear, Linear) for _ in range(depth - 4)]
    first = [OneHot(vocab_size), Linear(vocab_size, WIDTH), Ignore()]
    return [*first, *mixers, nn.Linear(WIDTH, vocab_size)]


def functions(vocab_size: int, depth: int) -> list[Callable[[], nn.Module]]:
    """Return functions that make the layers where they are needed."""
    inner = [partial(Mixer, Linear, nn.Linear) for _ in range(depth - 2)]
    return [
        partial(nn.Embedding, vocab_size, WIDTH),
        *inner,
        partial(nn.Linear, WIDTH, vocab_size),
    ]


def tied_functions(vocab_size: int, depth: int) -> list[Callable[[], nn.Module]]:
    """Return functions that make the layers; the first and the last share a matrix."""
    table = nn.Embedding(vocab_size, WIDTH)

    def head() -> nn.Module:
        made = Linear(WIDTH, vocab_size, bias=False)
        made.weight = table.weight
        return made

    inner = [partial(Mixer, Linear, nn.Linear) for _ in range(depth - 2)]
    return [lambda: table, *inner, head]


@dataclass(frozen=True)
class Own:
    """A model of this file in a layout; `case` has no effect on the model itself."""

    model: str
    case: Case
    depth: int
    loss: str | None = None
    """Name of a loss in this file."""

    @property
    def name(self) -> str:
        return f"{self.model}: {self.case.name}"


def settle(own: Own) -> tuple[Config, Layout]:
    """Return the resolved configuration, and the layout."""
    config, _ = configure(own.case)
    model = ModelConfig(
        source=f"{__name__}:{own.model}",
        options={"depth": own.depth},
        vocab_size=own.case.vocab,
        dtype="fp64",
    )
    loss = None if own.loss is None else f"{__name__}:{own.loss}"
    train = config.train.model_copy(update={"loss_function": loss})
    config = config.model_copy(update={"model": model, "train": train})
    return resolve(config, own.case.world, own.case.vocab, measure=BY_UNITS)


def run_own(world: World, all_of_them: Sequence[Own]) -> list[Outcome]:
    """Train each model on this rank."""
    results = []
    for own in all_of_them:
        try:
            config, layout = settle(own)
            case = own.case
            step = TrainStep(config, layout, world.mesh(case.grid))
            results.append(train(step, case, validate=False))
        except Exception as error:
            error.add_note(own.name)
            raise
    return results


def train_plain(own: Own, rates: Sequence[float]) -> tuple[Params, list[Step]]:
    """Return the initial weights by name, and the steps of one process of plain torch."""
    config, _ = settle(own)
    source = ModelFactory(
        f"{__name__}:{own.model}", {"vocab_size": own.case.vocab, "depth": own.depth}
    )
    made = source.make(config.run.seed, range(own.depth))
    layers = nn.ModuleList(made[i] for i in range(own.depth)).double()
    named = {
        place.spec.name: place.module._parameters[place.attribute]
        for place in parameter_places(dict(enumerate(layers)), own.depth - 1, source)
    }

    def forward(tokens: Tensor) -> Tensor:
        x: Any = (tokens,)
        for layer in layers:
            x = layer(*x)
            x = x if isinstance(x, tuple) else (x,)
        logits: Tensor = x[0]
        return logits

    return plain_steps(own.case, config, named, forward, rates)


def plain_steps(
    case: Case,
    config: Config,
    named: Mapping[str, Any],
    forward: Callable[[Tensor], Tensor],
    rates: Sequence[float],
) -> tuple[Params, list[Step]]:
    """Return the initial weights and the steps of one process of plain torch.

    `named`: parameters by name; those that require gradients are trained. `forward`: tokens [b, s]
    -> logits [b, s, V].
    """
    groups: dict[bool, list[Any]] = {True: [], False: []}
    trained = {name: p for name, p in named.items() if p.requires_grad}
    for parameter in trained.values():
        groups[parameter.dim() >= 2].append(parameter)
    given = config.optimizer
    options = given.rule_options
    assert isinstance(options, AdamOptions)
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": given.weight_decay * d} for d, group in groups.items()],
        betas=(options.betas[0], options.betas[1]),
        eps=options.eps,
    )
    initial = {name: p.detach().clone() for name, p in named.items()}
    steps = []
    for number, rate in enumerate(rates):
        tokens, labels, mask = batch_of(case, number)
        logits = forward(tokens)
        losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        loss = (losses * mask.flatten()).sum() / mask.sum()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        for p in trained.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        grads = {name: p.grad.clone() for name, p in trained.items()}
        assert given.max_grad_norm is not None
        norm = float(nn.utils.clip_grad_norm_(list(trained.values()), given.max_grad_norm))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        after = {name: p.detach().clone() for name, p in named.items()}
        steps.append(Step(loss.item(), grads, norm, after, Told(case.batch)))
    return initial, steps


def check_in_worlds(
    every: Sequence[Any],
    run: Callable[[World, Sequence[Any]], list[Outcome]],
    check: Callable[[Any, Sequence[Outcome]], None],
) -> None:
    """Train and check all of `every`, objects with a `case`: those of one world size in one world.

    `run` trains some on a rank, and `check` looks at what all ranks saw of one.
    """
    by_world: dict[int, list[Any]] = {}
    for one in every:
        by_world.setdefault(one.case.world, []).append(one)
    for size, group in sorted(by_world.items()):
        results = run_world(size, run, group)
        for i, one in enumerate(group):
            try:
                check(one, [outcomes[i] for outcomes in results])
            except AssertionError as error:
                error.add_note(one.name)
                raise


def check_own(own: Own, outcomes: Sequence[Outcome]) -> None:
    """Check loss, every gradient, gradient norm and weights against a single process, to 1e-10."""
    check_steps(outcomes, *train_plain(own, outcomes[0].rates))


def check_steps(
    outcomes: Sequence[Outcome], initial: Params, steps: Sequence[Step], tolerance: float = 1e-10
) -> None:
    """Check loss, every gradient, gradient norm and weights of each step."""
    from tests.parity.compare import assert_grads_close, assert_scalar_close, assert_weights_close

    start = assemble([outcome.values[0].get("model", []) for outcome in outcomes], initial)
    assert all(start[name].equal(tensor) for name, tensor in initial.items())
    for i, step in enumerate(steps):
        for outcome in outcomes:
            assert_scalar_close("loss", outcome.losses[i], step.loss, tolerance)
            assert_scalar_close("norm", outcome.norms[i], step.grad_norm, tolerance)
        grads = assemble([outcome.grads[i] for outcome in outcomes], step.grads)
        assert_grads_close(grads, step.grads, tolerance)
        weights = assemble(
            [outcome.values[i + 1].get("model", []) for outcome in outcomes], initial
        )
        assert_weights_close(weights, step.params, outcomes[0].rates[i], tolerance)
