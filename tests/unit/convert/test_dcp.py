"""Folders of torch.distributed.checkpoint, both ways, bit by bit, and what is refused of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from megapipe.checkpoint.find import find_checkpoint
from megapipe.cli import parse, stored_model
from megapipe.config.model import ModelConfig
from megapipe.convert import export
from megapipe.convert.commands import main
from megapipe.convert.dcp.files import DcpFiles
from megapipe.convert.dcp.folder import NativeTensors, open_dcp
from megapipe.errors import CheckpointError
from megapipe.model.gpt.hf.weights import to_hf
from tests.parity.both_ways import write_run
from tests.parity.cases import Case, configure
from tests.parity.converted import assert_same, write_checkpoint
from tests.parity.dcp_files import save_dcp
from tests.parity.reference import init_random

LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""Modules of Meta's Llama, and what Hugging Face's classes call them."""


def assert_run_has(run: Path, model: ModelConfig, params: dict[str, Tensor]) -> None:
    checkpoint = find_checkpoint(run)
    assert stored_model(checkpoint.config) == model
    assert_same({n.removeprefix("model/"): checkpoint.read(n) for n in checkpoint.names()}, params)


FULL = [pytest.param(case, marks=pytest.mark.full) for case in ("gemma2", "pythia", "dots1")]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", ["gpt2", "llama_gqa", *FULL])
def test_both_ways(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names are those of a class, whose model torch loads, or ours."""
    monkeypatch.chdir(tmp_path)
    model, params = write_run(tmp_path, case)
    for names in ("hf", "megapipe"):
        assert main(["megapipe-to-dcp", "run", f"dcp_{names}", "--names", names]) == 0
        assert main(["dcp-to-megapipe", f"dcp_{names}", names, "--tokenizer", "byte"]) == 0
        assert_run_has(tmp_path / names, model, params)
    hf = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("dcp_hf")).float()
    state = hf.state_dict()
    dcp.load(state, checkpoint_id="dcp_hf", no_dist=True)
    hf.load_state_dict(state)
    export(find_checkpoint(tmp_path / "run"), tmp_path / "exported", tokenizer="none")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    tokens = torch.arange(34).view(2, 17) % 259
    with torch.no_grad():
        assert torch.equal(hf(tokens).logits, other(tokens).logits)
    capsys.readouterr()
    assert main(["inspect", "dcp_hf"]) == 0
    assert "dcp_hf: torch.distributed.checkpoint\n" in capsys.readouterr().out
    assert main(["inspect", "dcp_megapipe", "--config"]) == 0
    Path("model.yaml").write_text(capsys.readouterr().out)
    assert parse(["model.yaml"]).config.model == model
    narrow = ["megapipe-to-dcp", "run", "narrow", "--dtype", "bf16"]
    assert main(narrow) == 0
    for name, stored in DcpFiles.open(Path("narrow")).tensors.items():
        assert stored.dtype == ("F32" if name.endswith("correction_bias") else "BF16"), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_experts_and_their_biases_by_our_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that no class expresses has our names by default."""
    monkeypatch.chdir(tmp_path)
    case = Case(moe="groups", layers=2, dtype="fp32", tied=False, vocab=259)
    model = configure(case)[0].model
    params = init_random(model, seed=5, dtype=torch.float32)
    write_checkpoint(tmp_path / "run", model, params)
    assert main(["megapipe-to-dcp", "run", "refused", "--names", "hf"]) == 2
    assert "cannot be expressed by Hugging Face's" in capsys.readouterr().err
    assert main(["megapipe-to-dcp", "run", "dcp"]) == 0
    assert "no Hugging Face class can express the model" in capsys.readouterr().err
    assert main(["dcp-to-megapipe", "dcp", "again", "--tokenizer", "byte"]) == 0
    assert_run_has(tmp_path / "again", model, params)
    index = DcpFiles.open(Path("dcp"))
    name = next(name for name in index.tensors if name.endswith("router.bias"))
    del index.tensors[name]
    with pytest.raises(CheckpointError, match=f"tensor {name} is none; the model has"):
        NativeTensors(Path("dcp"), model, index)


def in_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder rows of queries or keys whose values i and i + head_dim / 2 are rotated together, so
    that values 2 i and 2 i + 1 are."""
    rows = torch.arange(len(weight)).view(-1, head_dim)
    half = head_dim // 2
    order = torch.cat([torch.stack([head[:half], head[half:]], dim=1).flatten() for head in rows])
    return weight[order]


def test_torchtitans_llama(tmp_path: Path) -> None:
    """It has optimizer states beside it, or a prefix in names; the attention is the same."""
    model, params = write_run(tmp_path, "llama_gqa")
    width = model.head_dim or 0
    state = to_hf(params, model)
    titan = {
        "tok_embeddings.weight": state["model.embed_tokens.weight"],
        "norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for layer in range(model.layers):
        for theirs, name in LAYER.items():
            weight = state[f"model.layers.{layer}.{name}.weight"]
            turned = theirs in ("attention.wq", "attention.wk")
            titan[f"layers.{layer}.{theirs}.weight"] = in_pairs(weight, width) if turned else weight
    export(find_checkpoint(tmp_path / "run"), tmp_path / "hf", tokenizer="none")
    save_dcp({**titan, "optimizer.state.norm.weight.step": torch.ones(1)}, tmp_path / "titan")
    config = tmp_path / "hf/config.json"
    for source in (
        open_dcp(tmp_path / "titan", config=config),
        _below(tmp_path / "prefixed", titan, config),
    ):
        assert source.model == model
        assert_same({n.removeprefix("model/"): source.read(n) for n in source.shapes()}, params)

    x = torch.randn(7, model.hidden, generator=torch.Generator().manual_seed(1))
    q, k = (state[f"model.layers.0.self_attn.{n}_proj.weight"][:width] for n in "qk")
    angles = torch.outer(torch.arange(7.0), 500.0 ** (-torch.arange(0, width, 2) / width))
    a, b = (turn_halves(F.linear(x, w), angles) for w in (q, k))
    c, d = (turn_pairs(F.linear(x, in_pairs(w, width)), angles) for w in (q, k))
    assert torch.allclose(a @ b.t(), c @ d.t(), atol=1e-5)
    assert not torch.allclose(a @ b.t(), F.linear(x, q) @ F.linear(x, k).t(), atol=1e-2)


def turn_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate [s, head_dim] by [s, head_dim / 2] as Hugging Face does."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def turn_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate as Meta does, with complex numbers."""
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(turned * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def _below(folder: Path, state: dict[str, Tensor], config: Path) -> Any:
    save_dcp({f"model.{name}": x for name, x in state.items()} | {"step": torch.ones(1)}, folder)
    return open_dcp(folder, config=config, prefix="model.")


def deeper(folder: Path) -> None:
    path = folder / "there/config.json"
    path.write_text(path.read_text().replace('"n_layer": 3', '"n_layer": 4'))


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


READ = "dcp-to-megapipe there new --tokenizer byte"
BAD: list[tuple[str, int, tuple[str, ...], str, Callable[[Path], object]]] = [
    ("no config", 2, ("there has neither config.json nor config.yaml", "--config"), READ,
     without("there/config.json")),
    ("config", 2, ("--config run: ", "a folder with"), f"{READ} --config run",
     lambda f: [(f / "run").rename(f / "x"), (f / "run").write_text("")]),
    ("config gone", 5, ("cannot read gone/config.json",), f"{READ} --config gone/config.json",
     lambda f: None),
    ("yaml", 2, ("model.vocab_size is not set",), f"{READ} --config a.yaml",
     lambda f: (f / "a.yaml").write_text("model: {layers: 3}")),
    ("prefix", 5, ("no tensor that begins with 'x.'",), f"{READ} --prefix x.", lambda f: None),
    ("other model", 5, ("transformer.h.3.ln_1.weight is missing",), READ, deeper),
    ("no index", 5, ("cannot read there/.metadata",), READ, without("there/.metadata")),
    ("output", 5, ("there exists already",), "megapipe-to-dcp run there", lambda f: None),
    ("class", 2, ("model.norm = layernorm", "llama"), "megapipe-to-dcp run new --model-type llama",
     lambda f: None),
    ("no checkpoint", 5, ("there is neither a checkpoint",), "megapipe-to-dcp there new",
     lambda f: None),
]  # fmt: skip


@pytest.mark.parametrize(("code", "words", "argv", "prepare"), [x[1:] for x in BAD],
                         ids=[x[0] for x in BAD])  # fmt: skip
def test_bad_input_is_one_line_with_a_code(
    code: int,
    words: tuple[str, ...],
    argv: str,
    prepare: Callable[[Path], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, "gpt2")
    assert main(["megapipe-to-dcp", "run", "there"]) == 0
    capsys.readouterr()
    prepare(tmp_path)
    assert main(argv.split()) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megapipe: error: ")
    for word in words:
        assert word in line, line
    assert not (tmp_path / "new").exists()
