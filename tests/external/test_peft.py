"""Adapters train as with peft, on the same model and batches, and each side loads the other's
result. Runs if peft is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from megapipe import TrainStep, train
from megapipe.checkpoint.find import find_checkpoint
from megapipe.checkpoint.reader import Checkpoint
from megapipe.config.config import Config, OptimizerConfig, TrainConfig
from megapipe.config.lora import LoraConfig
from megapipe.config.update_rules import AdamOptions
from megapipe.convert import HuggingFaceFolder, export
from megapipe.convert.adapters import export_adapters
from megapipe.distributed.mesh import Grid
from megapipe.errors import ConfigError
from megapipe.generate.generator import Generator
from megapipe.inference import load_model
from megapipe.layout.resolve import resolve
from megapipe.optim.lr import learning_rate
from megapipe.testing import World, run_world
from megapipe.train.resume.load import load_weights
from tests.parity.class_models import make_class
from tests.parity.compare import assert_grads_close, assert_scalar_close, assert_weights_close
from tests.parity.converted import write_checkpoint
from tests.parity.outcome import assemble, own_grads
from tests.parity.reference import ADAPTER_SCALE, Batch, init_random, logits, random_batch
from tests.parity.tiers import in_parts
from tests.unit.model.transformers_models import in_double, model_of

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.full

STEPS, SAMPLES, LENGTH = 3, 4, 8
CASES = {
    "llama": ("llama_gqa", LoraConfig(rank=3, alpha=4.5)),
    "gpt2": ("gpt2", LoraConfig(rank=4, alpha=8, rslora=True)),
    "some": ("llama_gqa", LoraConfig(rank=2, targets=["attention.q", "attention.v", "mlp.up"])),
    "neox": ("pythia", LoraConfig(rank=2)),
}


def config_of(case: str) -> Config:
    name, lora = CASES[case]
    return Config(
        model=model_of(name).model_copy(update={"dtype": "fp64", "vocab_size": 64}),
        lora=lora,
        optimizer=OptimizerConfig(lr=1e-2, min_lr=1e-3, warmup_steps=1, max_grad_norm=0.05),
        train=TrainConfig(steps=STEPS, sequence_length=LENGTH, global_batch=SAMPLES, microbatch=2),
    )


def batches(config: Config) -> list[Batch]:
    seeds = range(STEPS)
    return [random_batch(config.model, SAMPLES, LENGTH, seed=9 + i, masked=0.3) for i in seeds]


def trained(world: World, case: str, folder: Path) -> dict[str, Any]:
    """Train from ``folder/base``. Return losses, gradients by name, and the checkpoints before and
    after."""
    config, layout = resolve(config_of(case), 1, 64)
    mesh, given = world.mesh(Grid()), batches(config)
    step = TrainStep(config, layout, mesh)
    load_weights(HuggingFaceFolder.open(folder / "base"), step.state, mesh)
    found: dict[str, Any] = {"losses": [], "grads": [], "first": step.save(folder / "saved", 0)}
    finish = step.optimizer.finish_reduce

    def spy(loss_scale: float = 1.0) -> Tensor:
        squares = finish(loss_scale)
        found["grads"].append(list(own_grads(step.optimizer)))
        return squares

    def rows(indices: Sequence[int]) -> Batch:
        number, first = divmod(indices[0], SAMPLES)
        here = [first + i for i in range(len(indices))]
        return tuple(each[here] for each in given[number])  # type: ignore[return-value]

    step.optimizer.finish_reduce = spy  # type: ignore[method-assign]
    for i in range(STEPS):
        found["losses"] += [result.loss for result in step.train(i, rows) or step.settle()]
    step.settle()
    found["last"] = step.save(folder / "saved", STEPS)
    return found


def transformers_model(folder: Path) -> Any:
    ways = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **ways)


def loaded(folder: Path, adapter: Path, *, learn: bool = False) -> Any:
    base = transformers_model(folder / "base")
    return peft.PeftModel.from_pretrained(base, adapter, is_trainable=learn)


def adapters_of(model: Any) -> dict[str, Tensor]:
    """Return the values of all adapters, by the names in peft's files."""
    state: dict[str, Tensor] = peft.get_peft_model_state_dict(model)
    return {name: value.detach().clone() for name, value in state.items()}


def train_by_peft(model: Any, config: Config) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Take as many steps with peft. Return losses, and gradients before clipping."""
    learning = {
        n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad
    }
    own, options = config.optimizer, config.optimizer.rule_options
    assert isinstance(options, AdamOptions)
    adamw = torch.optim.AdamW(
        learning.values(),
        betas=(options.betas[0], options.betas[1]),
        eps=options.eps,
        weight_decay=own.weight_decay,
    )
    losses, grads = [], []
    for i, (tokens, labels, mask) in enumerate(batches(config)):
        logits = model(input_ids=tokens).logits
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        loss = each[mask.flatten()].mean()
        adamw.zero_grad()
        loss.backward()
        losses.append(loss.item())
        grads.append({name: p.grad.clone() for name, p in learning.items() if p.grad is not None})
        torch.nn.utils.clip_grad_norm_(learning.values(), own.max_grad_norm or 0.0)
        adamw.param_groups[0]["lr"] = learning_rate(own, i, STEPS)
        adamw.step()
    return losses, grads


@in_parts("case", CASES, full=["gpt2", "some"])
def test_steps_are_those_of_peft(case: str, tmp_path: Path) -> None:
    """Loss, every gradient, and the adapters after AdamW with clipping, in fp64; merged weights and
    adapters give the same logits."""
    config = resolve(config_of(case), 1, 64)[0]
    params = init_random(config.model, seed=5)
    export(
        write_checkpoint(tmp_path / "x", config.model, params), tmp_path / "base", tokenizer="none"
    )
    (ours,) = run_world(1, trained, case, tmp_path)
    with in_double(config.model):
        compare(ours, config, params, tmp_path)


def compare(
    ours: dict[str, Any], config: Config, params: dict[str, Tensor], tmp_path: Path
) -> None:
    """Compare a run with what peft computes from the same weights and batches."""
    first, last = (Checkpoint.open(Path(ours[name])) for name in ("first", "last"))
    export_adapters(first, tmp_path / "first")
    theirs = loaded(tmp_path, tmp_path / "first", learn=True)
    begun = adapters_of(theirs)
    assert {name for name, value in begun.items() if not value.any()} == {
        name for name in begun if "lora_B" in name
    }
    losses, grads = train_by_peft(theirs, config)
    for one, other in zip(ours["losses"], losses, strict=True):
        assert_scalar_close("loss", one, other, 1e-9)
    assert len(ours["grads"]) == len(grads) == STEPS
    for number, expected in enumerate(grads):
        # in peft's form, through a checkpoint of gradients
        like = {n: torch.empty(first.manifest.entries[f"model/{n}"].shape) for n in names_of(first)}
        found = assemble([ours["grads"][number]], like)
        as_saved = with_adapters_of(tmp_path / f"grads{number}", config, params, found)
        export_adapters(as_saved, tmp_path / f"as_peft{number}")
        assert_grads_close(
            adapters_of(loaded(tmp_path, tmp_path / f"as_peft{number}")), expected, 1e-9
        )
    export_adapters(last, tmp_path / "last")
    adapted = loaded(tmp_path, tmp_path / "last")
    assert_weights_close(adapters_of(adapted), adapters_of(theirs), config.optimizer.lr, 1e-9)

    export(last, tmp_path / "merged", tokenizer="none")
    merged = transformers_model(tmp_path / "merged")
    tokens = batches(config)[0][0]
    with torch.no_grad():
        logits, whole = adapted(input_ids=tokens).logits, merged(input_ids=tokens).logits
        begin = loaded(tmp_path, tmp_path / "first")(input_ids=tokens).logits
    assert not torch.allclose(logits, begin)
    assert (logits - whole).abs().max() <= 1e-12 * logits.abs().max()


def adapted_checkpoint(name: str, lora: LoraConfig, folder: Path) -> tuple[Config, Checkpoint, Any]:
    """Write a checkpoint of an MoE model with adapters, and the model without them to
    ``folder/base``. Return configuration, checkpoint and all parameters."""
    model = model_of(name).model_copy(update={"dtype": "fp64", "vocab_size": 64})
    train = TrainConfig(sequence_length=LENGTH, global_batch=SAMPLES, microbatch=2)
    config = resolve(Config(model=model, lora=lora, train=train), 1, 64)[0]
    params = init_random(config.model, seed=5, lora=config.lora)
    adapters = {each: params[each] for each in params if ".lora_" in each}
    base = {each: params[each] for each in params if each not in adapters}
    export(write_checkpoint(folder / "x", config.model, base), folder / "base", tokenizer="none")
    return config, with_adapters_of(folder / "y", config, base, adapters), params


@pytest.mark.parametrize("name", ["mixtral", "dots1"])
def test_adapters_of_attention_beside_experts(name: str, tmp_path: Path) -> None:
    """The peft model has the logits of the merged weights, and these are the reference's."""
    lora = LoraConfig(rank=2, alpha=2 * ADAPTER_SCALE, targets=["attention.q", "attention.out"])
    config, checkpoint, params = adapted_checkpoint(name, lora, tmp_path)
    export_adapters(checkpoint, tmp_path / "adapter")
    tokens = random_batch(config.model, SAMPLES, LENGTH, seed=9)[0]
    expected = logits(params, config.model, tokens)
    with in_double(config.model), torch.no_grad():
        adapted = loaded(tmp_path, tmp_path / "adapter")
        assert len(adapters_of(adapted)) == 4 * config.model.layers
        found = adapted(input_ids=tokens).logits
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_adapters_of_a_shared_mlp(tmp_path: Path) -> None:
    """They are merged, and not exported for peft. In a class with experts peft takes an MLP's names
    for names of experts."""
    config, checkpoint, params = adapted_checkpoint(
        "dots1", LoraConfig(rank=2, alpha=2 * ADAPTER_SCALE), tmp_path
    )
    assert any(".moe.shared." in each for each in names_of(checkpoint))
    export(checkpoint, tmp_path / "merged", tokenizer="none")
    tokens = random_batch(config.model, SAMPLES, LENGTH, seed=9)[0]
    expected = logits(params, config.model, tokens)
    with in_double(config.model), torch.no_grad():
        found = transformers_model(tmp_path / "merged")(input_ids=tokens).logits
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
    with pytest.raises(ConfigError, match=r"has mlp.gate, .* dots1 class: remove --adapter"):
        export_adapters(checkpoint, tmp_path / "adapter")


def names_of(checkpoint: Checkpoint) -> list[str]:
    names = (name.removeprefix("model/") for name in checkpoint.names())
    return [name for name in names if ".lora_" in name and not name.startswith("optimizer.")]


def with_adapters_of(
    folder: Path, config: Config, params: dict[str, Tensor], adapters: dict[str, Tensor]
) -> Checkpoint:
    """Write a checkpoint with these adapters."""
    return write_checkpoint(folder, config.model, params | adapters, lora=config.lora)


def test_adapters_of_a_class(tmp_path: Path) -> None:
    """peft loads the adapters of a class of transformers, and computes what the run computes."""
    make_class("qwen3").save_pretrained(tmp_path / "base")
    run = train(
        {
            "model.source": f"hf:{tmp_path / 'base'}",
            "model.dtype": "fp64",
            "lora.rank": 2,
            "lora.targets": ["q_proj", "mlp.down_proj"],
            "run.folder": str(tmp_path),
            "train.steps": 2,
            "train.sequence_length": LENGTH,
            "train.global_batch": SAMPLES,
            "optimizer.lr": 1e-2,
        }
    )
    checkpoint = find_checkpoint(run, verify=False)
    export_adapters(checkpoint, tmp_path / "adapter")
    tokens = torch.arange(7, 14).view(1, 7)
    own = Generator(load_model(checkpoint, torch.device("cpu"))).read(tokens.tolist(), room=1)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    with torch.no_grad():
        plain = base(input_ids=tokens).logits[0, -1]
        model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
        expected = model(input_ids=tokens).logits[0, -1]
    logits = own.logits()
    assert logits is not None
    assert torch.allclose(logits[0, : len(expected)], expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(plain, expected, rtol=1e-6)
