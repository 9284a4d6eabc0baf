"""From a configuration to kernels and their one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapipe.assembly.kernels import select_kernels
from megapipe.config.config import Config, KernelsConfig
from megapipe.config.kernels import OnlyKernels
from megapipe.errors import ConfigError
from megapipe.layout.model_spec import model_spec_of
from megapipe.layout.resolve import resolve
from megapipe.ops.norm import torch_norm
from megapipe.train import kernel_selection as kernels_module
from megapipe.train.kernel_selection import agreed_kernels
from tests.unit.ops.fakes import apex_adam, apex_norms, liger, on_any_device

CPU = torch.device("cpu")


def config(**sections: dict[str, object]) -> Config:
    resolved, _ = resolve(Config.model_validate(sections), 1, None)
    return resolved


def banner(given: Config, dtype: torch.dtype = torch.float32) -> str:
    return select_kernels(given, model_spec_of(given).kernel_needs, CPU, dtype).banner()


def test_the_cpus_banner() -> None:
    start = (
        "kernels: attention flash (SDPA), norm torch (apex, liger: needs a GPU), "
        "weight_grad torch (apex, fused: needs a GPU)"
    )
    gate, update = "swiglu torch (liger: needs a GPU)", "optimizer torch (apex: needs a GPU)"
    llama = config(model={"activation": "swiglu", "positions": "rotary"})
    assert banner(config()) == f"{start}, loss torch, {update}"
    assert banner(llama) == f"{start}, rotary torch, loss torch, {gate}, {update}"
    assert banner(config(optimizer={"rule": "sgd"}, kernels={"loss_chunk_tokens": 0})) == start
    with_dropout = banner(config(model={"dropout": 0.1}))
    assert with_dropout.startswith("kernels: attention math (SDPA; flash: ")
    assert "non-zero dropout" in with_dropout
    assert banner(config(kernels={"only": {"attention": "math", "norm": "torch"}})).startswith(
        "kernels: attention math (as configured), norm torch (as configured), "
    )


def test_products_of_experts() -> None:
    experts = {"num_experts": 4, "expert_ffn_hidden": 128}
    chosen = banner(config(model={"moe": experts}, kernels={"only": {"expert_gemm": "grouped"}}))
    assert ", expert_gemm grouped (as configured), " in chosen
    assert ", expert_gemm loop, " in banner(config(model={"moe": experts}))
    split = config(model={"moe": experts | {"expert_ffn_hidden": 36}})
    with pytest.raises(ConfigError, match=r"needs rows of multiples of 16 bytes, not 72"):
        select_kernels(
            split.model_copy(
                update={"kernels": KernelsConfig(only=OnlyKernels(expert_gemm="grouped"))}
            ),
            model_spec_of(split).kernel_needs,
            CPU,
            torch.bfloat16,
        )


def test_what_is_there_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    on_any_device(monkeypatch)
    apex_norms(monkeypatch)
    apex_adam(monkeypatch)
    liger(monkeypatch)
    given = config(model={"activation": "swiglu"})
    kernels = select_kernels(given, model_spec_of(given).kernel_needs, CPU, torch.bfloat16)
    names = {choice.purpose: choice.name for choice in kernels.choices}
    assert names == {
        "attention": "flash",
        "norm": "apex",
        "weight_grad": "torch",
        "loss": "torch",
        "optimizer": "apex",
        "swiglu": "liger",
    }
    assert kernels.norm is not torch_norm
    (warning,) = kernels.warnings()
    assert warning.startswith("kernels.only.weight_grad: fused is not used: fails its self-check: ")
    plain = {"norm": "torch", "optimizer": "torch", "swiglu": "torch"}
    given = config(kernels={"only": plain})
    kernels = select_kernels(given, model_spec_of(given).kernel_needs, CPU, torch.bfloat16)
    assert kernels.norm is torch_norm
    given = config(model={"activation": "swiglu"}, kernels={"without": ["apex", "fused"]})
    kernels = select_kernels(given, model_spec_of(given).kernel_needs, CPU, torch.bfloat16)
    found = {choice.purpose: (choice.name, choice.why) for choice in kernels.choices}
    assert found["optimizer"] == ("torch", "apex: kernels.without")
    assert found["norm"] == ("liger", "apex: kernels.without")
    assert found["weight_grad"] == ("torch", "apex, fused: kernels.without")
    assert found["swiglu"][0] == "liger"
    assert kernels.warnings() == []


def test_a_kernel_that_is_asked_for_and_excluded() -> None:
    both = config(kernels={"only": {"norm": "apex"}, "without": ["apex"]})
    with pytest.raises(
        ConfigError, match=r"norm=apex is excluded by kernels.without=\[apex\]: expected"
    ):
        select_kernels(both, model_spec_of(both).kernel_needs, CPU, torch.float32)


def test_asking_for_what_is_not_there() -> None:
    for key, name in (("norm", "liger"), ("optimizer", "apex"), ("weight_grad", "fused")):
        given = config(kernels={"only": {key: name}})
        with pytest.raises(
            ConfigError, match=f"^kernels.only.{key}={name}: needs a GPU; expected auto$"
        ):
            select_kernels(given, model_spec_of(given).kernel_needs, CPU, torch.bfloat16)


@pytest.mark.parametrize("rank", [0, 1])
def test_compiling_is_announced_before_it_begins(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes half a minute and more, in which a log would show nothing."""
    given, layout = resolve(Config.model_validate({"kernels": {"compile": True}}), 1, None)
    kernels = select_kernels(given, model_spec_of(given).kernel_needs, CPU, torch.float32)
    monkeypatch.setattr(kernels_module, "_selected", lambda *args, **more: kernels)
    monkeypatch.setattr(kernels_module, "make_sharding", lambda *args: None)
    said = []

    def check(*args: Any, **more: Any) -> None:
        said.append(capsys.readouterr().err)

    monkeypatch.setattr(type(layout.model), "check_compiled", check)
    mesh: Any = SimpleNamespace(rank=rank, device=CPU)
    assert agreed_kernels(given, layout, mesh, layout.schedule) is kernels
    line = "megapipe: compiling blocks (kernels.compile=true) ...\n"
    assert said == ["" if rank else line]
