"""megatron-core's GPT on the CPU: its logits at any layout, and its checkpoints in both formats.

It expects a GPU, so its tensors are placed on the CPU (:func:`on_the_cpu`). Layers are its local
ones, without Transformer Engine. Import this module only if megatron-core is installed.
"""

from __future__ import annotations

import threading
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch
from zlib import crc32

import torch
from torch import Tensor
from torch.nn import functional as F

from megapipe.testing import World

VOCABULARY = 264
"""Padded vocabulary size; the byte tokenizer has 257 ids."""
POSITIONS = 19


class Layout(NamedTuple):
    """The layout of the ranks that save."""

    tp: int = 1
    pp: int = 1
    chunks: int = 1
    apart: bool = False
    """Whether torch_dist stores each layer's tensors by themselves."""


@dataclass(frozen=True)
class Case:
    """A model: its arguments as Megatron-LM stores them, and the arguments of its classes."""

    args: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    tied: bool = False

    def stored(self, tp: int, pp: int) -> Namespace:
        """Return the arguments of a run at `tp` and `pp`."""
        sizes = {
            "num_layers": 4,
            "hidden_size": 24,
            "num_attention_heads": 4,
            "kv_channels": 6,
            "padded_vocab_size": VOCABULARY,
            "max_position_embeddings": POSITIONS,
            "norm_epsilon": 1e-5,
            "untie_embeddings_and_output_weights": not self.tied,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "params_dtype": torch.float32,
        }
        return Namespace(**{**sizes, **self.args})


CASES = {
    "gpt": Case(
        {"ffn_hidden_size": 96, "bias_gelu_fusion": True},
        {"activation_func": partial(F.gelu, approximate="tanh")},  # its fused kernel's
        tied=True,
    ),
    "gpt, exact": Case({"ffn_hidden_size": 40, "bias_gelu_fusion": False}),
    "llama": Case(
        {
            "ffn_hidden_size": 40,
            "swiglu": True,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "group_query_attention": True,
            "num_query_groups": 2,
            "position_embedding_type": "rope",
            "rotary_base": 500,
        },
        {"num_query_groups": 2, "activation_func": F.silu, "gated_linear_unit": True},
    ),
    "qwen": Case(
        {
            "ffn_hidden_size": 40,
            "swiglu": True,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "add_qkv_bias": True,
            "qk_layernorm": True,
            "position_embedding_type": "rope",
            "kv_channels": 8,
            "rotary_percent": 0.5,
            "use_rope_scaling": True,
            "rope_scaling_factor": 4.0,
        },
        {"activation_func": F.silu, "gated_linear_unit": True},
        tied=True,
    ),
}
_SHARED = ("ffn_hidden_size", "normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm")


def save_and_run(
    world: World,
    name: str,
    folder: Path,
    tokens: Tensor,
    layout: Layout,
) -> Tensor | None:
    """Save random weights of a case to ``folder/legacy`` and ``folder/torch_dist``. Return the
    logits [b, s, V] on the last stage."""
    warnings.filterwarnings("ignore", module=r"megatron\.")  # of Apex, which needs a GPU
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    case, (tp, pp, chunks, apart) = CASES[name], layout
    virtual = chunks if chunks > 1 else None
    parallel_state.initialize_model_parallel(tp, pp, virtual)
    initialize_rng_tracker(inference_rng_tracker=True)
    with on_the_cpu():
        stages = [_stage(case, chunk, tp, pp, chunks) for chunk in range(chunks)]
        args = case.stored(tp, pp)
        _save_legacy(stages, args, folder / "legacy", pp)
        state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
        metadata = {"singleton_local_shards": True} if apart else None
        for i, stage in enumerate(stages):
            key = f"model{i}" if chunks > 1 else "model"
            state[key] = stage.sharded_state_dict(metadata=metadata)
        target = folder / "torch_dist/iter_0000007"
        target.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save(state, str(target), ("torch_dist", 1))
        return _logits(stages, tokens, world, tp, pp)


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Give megatron-core the CPU if it asks for CUDA, and threads to write files. It would use
    processes, which a process of a test may not start."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    threads = SimpleNamespace(Queue=Queue, JoinableQueue=Queue, Process=threading.Thread)
    with ExitStack() as patches:
        for owner, attribute, value in (
            (filesystem_async, "_results_queue", Queue()),
            (filesystem_async.mp, "get_context", lambda kind: threads),
            (filesystem_async, "_process_memory", lambda: 0),  # by psutil, for its log
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
            (torch.cuda, "synchronize", lambda: None),
            (Tensor, "cuda", lambda self: self),
        ):
            patches.enter_context(patch.object(owner, attribute, value))
        yield


def _stage(case: Case, chunk: int, tp: int, pp: int, chunks: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    virtual = chunks if chunks > 1 else None
    args = case.stored(tp, pp)
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        kv_channels=args.kv_channels,
        layernorm_epsilon=args.norm_epsilon,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,  # kernels for a GPU
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        **{key: case.args[key] for key in _SHARED if key in case.args},
        **case.config,
    )
    spec = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    place = {"ignore_virtual": False, "vp_stage": chunk if virtual else None}
    stage = GPTModel(
        config,
        spec,
        VOCABULARY,
        POSITIONS,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        parallel_output=False,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type=case.args.get("position_embedding_type", "learned_absolute"),
        rotary_percent=case.args.get("rotary_percent", 1.0),
        rotary_base=case.args.get("rotary_base", 10000),
        rope_scaling=case.args.get("use_rope_scaling", False),
        rope_scaling_factor=case.args.get("rope_scaling_factor", 8.0),
        vp_stage=place["vp_stage"],
    )
    rank = parallel_state.get_tensor_model_parallel_rank()
    number = chunk * pp + parallel_state.get_pipeline_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            _draw(name, parameter, stage=number, rank=rank)
    return stage


def _draw(name: str, parameter: Any, *, stage: int, rank: int) -> None:
    """Fill a parameter with values under which nothing vanishes, equal on all ranks that hold
    it."""
    own = rank if getattr(parameter, "tensor_model_parallel", False) else -1
    if name == "output_layer.weight":
        name, stage = "embedding.word_embeddings.weight", 0
    generator = torch.Generator().manual_seed(crc32(f"{name} {stage} {own}".encode()))
    draw = torch.randn(parameter.shape, generator=generator)
    if parameter.dim() == 2:
        parameter.copy_(draw / parameter.shape[1] ** 0.5)
    else:
        parameter.copy_(0.1 * draw + float(name.endswith("weight")))


def _save_legacy(stages: list[Any], args: Namespace, folder: Path, pp: int) -> None:
    """Save the stages as Megatron-LM's own save does."""
    from megatron.core import parallel_state

    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    name = f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if pp > 1 else "")
    path = folder / "iter_0000007" / name / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
    for i, stage in enumerate(stages):
        key = f"model{i}" if len(stages) > 1 else "model"
        state[key] = stage.state_dict_for_save_checkpoint()
    torch.save(state, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def _logits(stages: list[Any], tokens: Tensor, world: World, tp: int, pp: int) -> Tensor | None:
    """Run one forward through all stages; ranks are tp within pp."""
    b, s = tokens.shape
    positions = torch.arange(s).expand(b, s)
    hidden_from = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
    count, own = pp * len(stages), world.rank // tp
    hidden, out = torch.empty(s, b, 24), None
    with torch.no_grad():
        for number in range(count):
            if number % pp != own:
                continue
            stage = stages[number // pp].eval()
            if number and pp > 1:
                torch.distributed.recv(hidden, (world.rank - tp) % world.size)
            stage.set_input_tensor(hidden)
            out = stage(tokens, positions, hidden_from)
            if number < count - 1 and pp > 1:
                torch.distributed.send(out, (world.rank + tp) % world.size)
    return out if own == (count - 1) % pp else None
