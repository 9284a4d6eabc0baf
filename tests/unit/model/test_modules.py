"""Lists of a user's modules: sizes are those of a real forward, and what cannot be is refused."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.distributed.axis import Axis
from megapipe.errors import ConfigError
from megapipe.layers import ColumnLinear, Linear, RowLinear
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import Sharding, release_initial, spec_of
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.model.modules.model_spec import ModuleListSpec
from megapipe.model.modules.units import ModelFactory
from megapipe.plan.units import Units

WIDTH, LENGTH, ROWS, WORDS = 8, 6, 2, 257


class Calls(nn.Module):
    """A module that runs a function on what it is given, with its own `modules`."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = function

    def forward(self, *x: Tensor) -> Any:
        return self.function(self, *x)


class Running(nn.Module):
    """A module that adds the mean of what it has seen, a buffer that is made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = (self.mean + x.detach().mean((0, 1))) / 2
        return x + self.mean


def pair(between: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> Calls:
    """Build a column and a row layer with something between them."""
    up, down = ColumnLinear(WIDTH, 4 * WIDTH), RowLinear(4 * WIDTH, WIDTH)
    return Calls(lambda own, x: own.down(between(own, own.up(x))), up=up, down=down, **modules)


def attention(own: Any, x: Tensor) -> Tensor:
    """Attend with heads of size 2, as many as the width has."""
    q, k, v = (y.unflatten(-1, (-1, 2)).transpose(1, 2) for y in (own.q(x), own.k(x), own.v(x)))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + own.o(mixed.transpose(1, 2).flatten(2))


def heads(column: type[Linear], row: type[Linear]) -> Calls:
    made = {name: column(WIDTH, WIDTH, bias=False) for name in "qkv"}
    return Calls(attention, **made, o=row(WIDTH, WIDTH))


@pytest.fixture
def resolved_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Config, Layout]]:
    """Resolve a model of some layers between an embedding and a head."""

    def made(
        inner: Callable[[], Sequence[nn.Module]], *keys: str, **given: Any
    ) -> tuple[Config, Layout]:
        def layers(vocab_size: int) -> list[nn.Module]:
            ends = nn.Embedding(vocab_size, WIDTH), nn.Linear(WIDTH, vocab_size)
            return [ends[0], *inner(), ends[1]]

        module = ModuleType("written_here")
        module.__dict__.update(layers=layers, **given)
        monkeypatch.setitem(sys.modules, "written_here", module)
        config = parse(
            [
                "model.source=written_here:layers",
                f"train.sequence_length={LENGTH}",
                f"train.microbatch={ROWS}",
                "train.global_batch=4",
                *keys,
            ]
        ).config
        return resolve(config, None, None, device="cpu")

    return made


@pytest.fixture
def layout_of(resolved_of: Callable[..., tuple[Config, Layout]]) -> Callable[..., Layout]:
    return lambda *given, **more: resolved_of(*given, **more)[1]


TP2 = "parallel.tp=2"


class Scaled(nn.Module):
    """A layer that multiplies the shard of a value by the mean of its whole input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = ColumnLinear(WIDTH, 2 * WIDTH), RowLinear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * x.mean(-1, keepdim=True))  # type: ignore[no-any-return]


def normed(own: Any, x: Tensor) -> Tensor:
    return own.norm(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        (
            lambda: [pair(normed, norm=nn.LayerNorm(2 * WIDTH))],
            "layer 1: norm.weight is used between a ColumnLinear and a RowLinear",
        ),
        (
            lambda: [Scaled()],
            "layer 1: a value that all of parallel.tp=2 ranks have is used between a ColumnLinear",
        ),
        (
            lambda: [pair(lambda own, x: functional.dropout(x, 0.1))],
            r"layer 1: random numbers \(bernoulli_\) between",
        ),
        (
            lambda: [pair(lambda own, x: x * torch.rand(x.shape, device=x.device))],
            r"layer 1: random numbers \(mul\) between",
        ),
        (
            lambda: [Calls(lambda own, x: own.up(x)[..., :WIDTH], up=ColumnLinear(WIDTH, 16))],
            "layer 1: it returns the shard of a ColumnLinear",
        ),
        (
            lambda: [Calls(lambda own, x: own.down(x[..., :4]), down=RowLinear(WIDTH, WIDTH))],
            "layer 1: RowLinear down gets no shard",
        ),
        (
            lambda: [pair(lambda own, x: own.more(x), more=ColumnLinear(2 * WIDTH, 8 * WIDTH))],
            "layer 1: ColumnLinear more gets the shard",
        ),
        (
            lambda: [pair(lambda own, x: x.view(ROWS, LENGTH, 4, WIDTH).flatten(2))],
            r"layer 1: fails on the meta device of one of parallel\.tp=2 ranks: RuntimeError",
        ),
        (
            lambda: [pair(lambda own, x: x), Calls(lambda own, x: x, up=ColumnLinear(WIDTH, 3))],
            r"layers\.2\.up\.weight has 3 rows, which parallel\.tp=2 does not divide",
        ),
    ],
    ids=[
        "parameter",
        "whole value",
        "dropout",
        "drawn",
        "no row",
        "no column",
        "two columns",
        "fixed heads",
        "odd",
    ],
)
def test_what_several_ranks_would_get_wrong_is_refused(
    layout_of: Callable[..., Layout], inner: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        layout_of(inner, TP2)


def test_one_rank_may_do_all_of_it(layout_of: Callable[..., Layout]) -> None:
    layout_of(
        lambda: [
            pair(normed, norm=nn.LayerNorm(4 * WIDTH)),
            pair(lambda own, x: functional.dropout(x, 0.1)),
            Calls(lambda own, x: own.up(x)[..., :WIDTH], up=ColumnLinear(WIDTH, 16)),
        ]
    )


def test_nothing_right_is_refused_on_two_ranks(layout_of: Callable[..., Layout]) -> None:
    """Attention without dropout, gates, dropout and norms around; weights looked at only."""

    def gated(own: Any, x: Tensor) -> Tensor:
        y = own.norm(x).to(own.up.weight.dtype)
        kept = torch.rand(y.shape[0], 1, 1, device=y.device).bernoulli()  # of whole samples
        inner = functional.silu(own.gate(y)) * own.up(y) * kept
        return x + functional.dropout(own.down(inner), 0.1)

    def inner() -> list[nn.Module]:
        columns = {name: ColumnLinear(WIDTH, 3 * WIDTH) for name in ("gate", "up")}
        down = RowLinear(3 * WIDTH, WIDTH)
        return [
            heads(ColumnLinear, RowLinear),
            Calls(gated, norm=nn.LayerNorm(WIDTH), down=down, **columns),
        ]

    layout_of(inner, TP2)


def outside(own: Any, x: Tensor) -> Tensor:
    return x + functional.linear(x, own.only.weight)


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        (
            lambda: [Calls(outside, only=Linear(WIDTH, WIDTH))],
            "layer 1: only.weight is used outside of its layer",
        ),
        (lambda: [Calls(lambda own, x: 3)], "layer 1 returns int"),
        (lambda: [Calls(lambda own, x: ())], "layer 1 returns nothing"),
        (lambda: [Calls(lambda own, x: x * 1j)], "layer 1 returns complex numbers"),
        (lambda: [Calls(lambda own, x: x[x > 0])], "layer 1: fails on the meta device: "),
        (lambda: [Calls(lambda own, x: x.long())], "layer 1 returns only integers"),
        (
            lambda: [nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH))],
            "layer 1 changes its buffer 1.num_batches_tracked",
        ),
        (lambda: [Running()], "layer 1 changes its buffer mean"),
        (
            lambda: [Calls(lambda own, x: torch.zeros(x.shape))],
            "layer 1 returns a tensor on the cpu whatever it is given: expected device=x.device",
        ),
        (lambda: [nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH + 1)], "layer 3: fails on the meta"),
        (
            lambda: [nn.Linear(WIDTH, WIDTH).requires_grad_(False)],
            r"layers\.1\.weight has requires_grad=False",
        ),
        (lambda: [3], "expected a list of modules"),
        (lambda: [lambda: 3], "layer 1 is a int, not a module"),
        (lambda: [lambda: 1 // 0], "layer 1 cannot be made: ZeroDivisionError"),
        (lambda: [nn.Linear(WIDTH, WIDTH)] * 2, r"layers \[1, 2\] share layers\.1\.weight"),
    ],
    ids=[
        "weight",
        "number",
        "nothing",
        "complex",
        "values",
        "whole",
        "buffer",
        "buffer anew",
        "device",
        "shapes",
        "frozen",
        "item",
        "made",
        "raises",
        "shared",
    ],
)
def test_what_cannot_run_is_refused(
    layout_of: Callable[..., Layout], inner: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        layout_of(inner)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda y, labels, mask: y.sum(-1), r"loss: it returns shape \[2, 6\]: expected a sum"),
        (lambda y, labels, mask: 0.0, "loss: it returns float: expected a sum"),
        (
            lambda y, labels: y.sum(),
            r"loss: it is called with \(logits, labels, mask\)",
        ),
        (lambda y, labels, mask: y.summed(), "loss: AttributeError: .*summed"),
    ],
)
def test_a_loss_that_gives_no_sum_is_refused(
    layout_of: Callable[..., Layout], loss: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"train.loss_function=written_here:{words}"):
        layout_of(list, "train.loss_function=written_here:loss", loss=loss)


def test_a_loss_may_ask_for_values(layout_of: Callable[..., Layout]) -> None:
    layout_of(
        list,
        "train.loss_function=written_here:loss",
        loss=lambda y, labels, mask: functional.cross_entropy(y[mask], labels[mask]),
    )


def test_a_function_may_ask_for_values(layout_of: Callable[..., Layout]) -> None:
    """Rates of dropout that grow with depth need it; a tie stays one, values are drawn anew."""

    def inner() -> list[nn.Module]:
        rates = torch.linspace(0, 0.5, 3).tolist()
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(rate)) for rate in rates]

    layout = layout_of(inner)
    assert layout.model.layers == 5
    assert layout.model.num_parameters() == 2 * WIDTH * WORDS + WORDS + 3 * (WIDTH * WIDTH + WIDTH)


def test_a_tie_made_with_values_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def layers() -> list[nn.Module]:
        first, last = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 7, bias=False)
        last.weight = first.weight
        assert torch.ones(()).item() == 1
        return [first, last]

    module = ModuleType("written_here")
    module.__dict__["layers"] = layers
    monkeypatch.setitem(sys.modules, "written_here", module)
    first, last = ModelFactory("written_here:layers", {}).sketch()
    assert first.weight is last.weight
    assert first.weight.device.type == "meta"


def kept_by(run: Callable[[], Tensor], weights: set[int]) -> int:
    """Count the bytes that autograd saves in a real forward."""
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = run()
    assert y.requires_grad
    return sum(each.untyped_storage().nbytes() for each in seen.values())


def passing(own: Any, x: Tensor) -> Tensor:
    """Add one, which saves nothing of the input."""
    return x + 1


def within_torch() -> nn.Module:
    return nn.MultiheadAttention(WIDTH, 2, batch_first=True)


def within(own: Any, x: Tensor) -> Tensor:
    return x + own.inner(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "mlp": lambda: [
        Calls(
            lambda own, x: x + own.down(functional.gelu(own.up(own.norm(x)))),
            norm=nn.LayerNorm(WIDTH),
            up=nn.Linear(WIDTH, 4 * WIDTH),
            down=nn.Linear(4 * WIDTH, WIDTH),
        )
    ],
    "attention": lambda: [heads(Linear, Linear)],
    "torch's attention": lambda: [Calls(within, inner=within_torch())],
    "both keep it": lambda: [nn.Tanh(), nn.Linear(WIDTH, WIDTH)],
    "dropout": lambda: [nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)],
    "no input": lambda: [Calls(passing), nn.Linear(WIDTH, WIDTH)],
}


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_the_plan_counts_what_autograd_keeps(
    resolved_of: Callable[..., tuple[Config, Layout]], model: str, cut: int
) -> None:
    """The first and the last stage are compared, with loss and what the backward needs."""
    layers = len(MODELS[model]()) + 2
    keys = ("parallel.pp=2", f"pipeline.stage_layout=[{cut}, {layers - cut}]")
    config, layout = resolved_of(MODELS[model], *keys)
    for number, stage in enumerate(layout.stage_layers):
        (unit,) = Units(config, layout).of(number)
        assert unit.held == held_by(layout, stage, first=number == 0)


def held_by(layout: Layout, stage: Any, *, first: bool) -> int:
    """Count the bytes of a real forward, with the input if it is a message, without the batch."""
    family = layout.model
    assert isinstance(family, ModuleListSpec)
    module = family.build(stage, Sharding(Axis.alone(), False, torch.float32))
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                real = nn.Parameter(torch.zeros(parameter.shape))
                real.spec = parameter.spec  # type: ignore[attr-defined]
                owner._parameters[name] = real
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    mb = MicroBatch(0, 0, 0, tokens=tokens, labels=tokens.clone(), mask=mask)
    x = None if first else torch.zeros(ROWS, LENGTH, WIDTH, requires_grad=True)
    given = [*module.parameters(), mb.tokens, mb.labels, mb.mask]
    weights = {each.untyped_storage().data_ptr() for each in given if each is not None}
    if x is None:
        return kept_by(partial(module, x, mb), weights)
    pointer = x.untyped_storage().data_ptr()
    return x.nbytes + kept_by(partial(module, x, mb), weights | {pointer})


def test_a_rank_computes_its_share_and_all_that_is_not_split(
    resolved_of: Callable[..., tuple[Config, Layout]],
) -> None:
    """Work of all ranks: split layers once, those that each rank computes as often as ranks."""

    def inner() -> list[nn.Module]:
        return [pair(lambda own, x: x), nn.Linear(WIDTH, WIDTH)]

    (_, one), (settings, two) = resolved_of(inner), resolved_of(inner, TP2)
    split, plain = 2 * 2 * 4 * WIDTH * WIDTH, 2 * WIDTH * WIDTH + 2 * WIDTH * WORDS
    for layout, tp in ((one, 1), (two, 2)):
        family = layout.model
        assert family.forward_flops(family.whole) == split + plain
        work = family.work(family.whole, (), recompute=True)
        assert work.F == work.R == split + tp * plain
        assert split == work.W
        assert 2 * work.F - split == work.I
    (unit,) = Units(settings, two).of(0)
    assert unit.queued == ROWS * LENGTH * 4 * (WIDTH + 4 * WIDTH // 2) * 2


class Turned(nn.Module):
    """Queries and keys of one head, turned as transformers does it."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=1))
        self.qk, self.out = nn.Linear(WIDTH, 128), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.angles(x)
        q, k = apply_rotary_pos_emb(*self.qk(x).unsqueeze(1).chunk(2, -1), cos, sin)
        mixed = functional.scaled_dot_product_attention(q, k, k, is_causal=True)
        return x + self.out(mixed.squeeze(1))

    def angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(x, torch.arange(x.shape[1], device=x.device)[None])
        return cos, sin


def test_buffers_keep_the_type_in_which_they_were_made(layout_of: Callable[..., Layout]) -> None:
    """In bf16 the cosines of a rotary module are wrong by 0.86 at 2,048 positions."""
    layout = layout_of(lambda: [Turned()], "model.dtype=bf16")
    module = layout.model.build(layout.model.whole, Sharding(Axis.alone(), False, torch.bfloat16))
    made, x = Turned(), torch.zeros(1, 2048, WIDTH)
    turned = module.layers["1"]
    assert isinstance(turned, Turned)
    assert {p.dtype for p in turned.parameters()} == {torch.bfloat16}
    assert torch.equal(turned.rotary.inv_freq, made.rotary.inv_freq)
    for found, expected in zip(turned.angles(x), made.angles(x), strict=True):
        assert torch.equal(found, expected)
    wrong = made.to(torch.bfloat16).angles(x)[0] - turned.angles(x)[0]
    assert wrong.abs().max() > 0.8


def table(own: Any, x: Tensor) -> Tensor:
    return x + own.norm.table


def test_a_product_of_two_types_is_refused_before_a_run(layout_of: Callable[..., Layout]) -> None:
    def layers() -> list[nn.Module]:
        norm = nn.LayerNorm(WIDTH)
        norm.register_buffer("table", torch.ones(LENGTH, WIDTH))
        return [Calls(table, norm=norm, own=nn.Linear(1, 1)), nn.Linear(WIDTH, WIDTH)]

    layout_of(layers)
    with pytest.raises(ConfigError, match=r"layer 2: .* a product of bfloat16 and float32"):
        layout_of(layers, "model.dtype=bf16")
    norm, last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    norm.register_buffer("table", torch.ones(LENGTH, WIDTH))
    inside = Calls(lambda own, x: own.last(table(own, x)), norm=norm, last=last)
    told = r"its buffer norm.table keeps the float32 in which it was made: .* \.to\(x.dtype\)"
    with pytest.raises(ConfigError, match=told):
        layout_of(lambda: [inside], "model.dtype=bf16")
    wide = Calls(lambda own, x: own.norm(table(own, x)), norm=norm)
    with pytest.raises(ConfigError, match=f"a norm of bfloat16 and float32.*{told}"):
        layout_of(lambda: [wide], "model.dtype=bf16")


def test_initial_values_are_let_go(layout_of: Callable[..., Layout]) -> None:
    layout = layout_of(lambda: [Linear(WIDTH, WIDTH)])
    module = layout.model.build(layout.model.whole, Sharding(Axis.alone(), False, torch.float32))
    parameters = list(module.parameters())
    initial = [spec_of(each).initial for each in parameters]
    tensors = [weakref.ref(each.tensor) for each in initial if each is not None]
    assert len(tensors) == len(parameters) == 5
    release_initial(parameters)
    gc.collect()
    assert [each() for each in tensors] == [None] * 5
