"""Keys that have an effect only beside others: what each of them needs for it.

Keys of the model and of the data have their rules beside their other checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megapipe.config import LR_SCHEDULES, Config
from megapipe.experts_config import OF_MAPS, ExpertsConfig
from megapipe.model.gpt.moe_config import MoEConfig
from megapipe.model.kernel_needs import KernelNeeds
from megapipe.unused_keys import Need, refuse_unused, refuse_without
from megapipe.update_rules import RULES, declaration
from megapipe.words import either


def check_effects(config: Config) -> None:
    """Raise :class:`ConfigError` for keys that have no effect beside the others.

    The model of `config` is resolved; what ``auto`` chooses may be open.
    """
    for needs in (_of_experts, _of_pipeline, _of_activations, _of_optimizer, _of_run):
        refuse_without("", config, needs(config))


def check_kernels(config: Config, kernels: KernelNeeds, name: str) -> None:
    """Refuse kernels asked for by name where the family `name` has nothing for them to do.

    Torch's own are taken, as a configuration may name them for all purposes, but for attention and
    norms of a family that calls none.
    """
    wanted, rule = config.kernels, config.optimizer.rule
    lacking = [key for key in ("attention", "norm") if getattr(kernels, key) is None]
    refuse_unused("kernels", wanted, lacking, f"with {name}, which calls none of megapipe's", "")
    plain = ("auto", "torch", "loop")

    def named(*keys: str) -> Sequence[str]:
        return [key for key in keys if getattr(wanted, key) not in plain]

    takers = either([name for name in RULES if RULES[name].takes_kernel])
    needs: list[Need] = [
        (named("swiglu"), kernels.gate, "model.activation=swiglu"),
        (named("rotary"), kernels.rotary, "model.positions=rotary"),
        (named("loss"), kernels.loss, "a loss in chunks (kernels.loss_chunk)"),
        (named("experts", "expert_rows"), bool(kernels.experts), "model.moe.experts"),
        (named("optimizer"), declaration(rule).takes_kernel, f"optimizer.rule={takers}"),
    ]
    refuse_without("kernels", wanted, needs)


def check_slice_times(config: Config, *, is_cut: bool) -> None:
    """Refuse times of slices where the schedule cuts no sequences."""
    if not is_cut:
        keys, why = ["slice_overhead", "slice_attention"], "where sequences are not cut"
        instead = ", or a pipeline.schedule with slices"
        refuse_unused("pipeline", config.pipeline, keys, why, instead)


def _of_experts(config: Config) -> Iterator[Need]:
    experts, moe, parallel = config.experts, config.model.moe, config.parallel
    has_experts = moe.experts is not None
    of_layer = [f"model.moe.{key}" for key in MoEConfig.model_fields if key != "experts"]
    named = [key for key in ExpertsConfig.model_fields if getattr(experts, key) != "auto"]
    of_ranks = [f"experts.{key}" for key in named]
    others = ["parallel.ep", "parallel.etp", "checkpoint.upcycle"]
    if config.model.source is None:  # a user-defined family may have experts too
        others.append("log.experts_every")
    yield [*of_layer, *of_ranks, *others], has_experts, "model.moe.experts"
    if not has_experts:
        return
    yield ["experts.pad"], moe.capacity is not None, "model.moe.capacity"
    of_maps = [f"experts.{key}" for key in OF_MAPS]
    of_rows = [key for key in of_ranks if key not in (*of_maps, "experts.pad")]
    is_split = parallel.ep * parallel.etp > 1
    yield of_rows, is_split, "parallel.ep or parallel.etp above 1"
    yield of_maps, is_split, "parallel.ep above 1"
    for key, policies in OF_MAPS.items():
        if policies:
            needed = f"experts.policy={either(policies)}"
            yield [f"experts.{key}"], experts.policy in policies, needed
    takes_node = experts.dispatch == "hierarchical" or experts.tells_nodes
    yield ["experts.node"], takes_node, "experts.dispatch=hierarchical"
    yield ["experts.topology"], moe.balance > 0, "model.moe.balance"


def _of_pipeline(config: Config) -> Iterator[Need]:
    pipeline = config.pipeline
    weights, is_stale = pipeline.weights, pipeline.weights != "synchronous"
    yield ["pipeline.placement"], pipeline.schedule == "auto", "pipeline.schedule=auto"
    yield ["pipeline.horizon"], weights == "predict", "pipeline.weights=predict"
    yield ["pipeline.correction"], weights == "correct", "pipeline.weights=correct"
    of_stale = ["pipeline.lr_anneal_steps", "pipeline.synchronous_steps", "optimizer.clip_scope"]
    yield of_stale, is_stale, "a pipeline.weights other than synchronous"


def _of_activations(config: Config) -> Iterator[Need]:
    activations = config.activations
    policies, blocks = activations.policies, ["activations.blocks"]
    by_block = bool(policies & {"selective", "full"}) or bool(activations.offload)
    needed = "activations.policy=selective or full, or activations.offload"
    if policies == {"stage"}:
        needed = "an activations.policy other than stage"
        by_block, blocks = False, [*blocks, "activations.offload"]
    yield blocks, by_block, needed
    yield ["activations.modules"], "selective" in policies, "activations.policy=selective"
    yield ["activations.span"], "full" in policies, "activations.policy=full"


def _of_optimizer(config: Config) -> Iterator[Need]:
    optimizer, is_fp16 = config.optimizer, config.model.dtype == "fp16"
    decaying = either([name for name in LR_SCHEDULES if name != "constant"])
    decays = optimizer.schedule != "constant"
    yield ["optimizer.min_lr", "optimizer.decay_steps"], decays, f"optimizer.schedule={decaying}"
    yield ["optimizer.shard_size"], optimizer.zero > 0, "optimizer.zero above 0"
    yield ["optimizer.prefetch"], optimizer.zero == 3, "optimizer.zero=3"
    rounds = optimizer.state_dtype == "bf16" or optimizer.master == "none"
    narrow = "optimizer.state_dtype=bf16, optimizer.master=none"
    yield ["optimizer.rounding"], rounds, narrow.replace(",", " or")
    is_away = optimizer.offload != "none"
    yield ["optimizer.window_mib"], rounds or is_away, f"{narrow} or optimizer.offload"
    yield ["optimizer.loss_scale", "optimizer.loss_scale_window"], is_fp16, "model.dtype=fp16"
    is_dynamic = optimizer.loss_scale is None
    yield ["optimizer.loss_scale_window"], is_dynamic, "optimizer.loss_scale=null"


def _of_run(config: Config) -> Iterator[Need]:
    numbers, log = config.numbers, config.log
    judges = numbers.spike_factor is not None
    yield ["numbers.spike", "numbers.spike_window"], judges, "numbers.spike_factor"
    for keys, action in ((["most_skipped"], "skip"), (["rewinds", "leave_out"], "rewind")):
        needed = f"numbers.non_finite={action}, or numbers.spike={action} with numbers.spike_factor"
        yield [f"numbers.{key}" for key in keys], action in numbers.actions, needed
    begins = config.checkpoint.load is not None
    yield ["checkpoint.load_only", "checkpoint.upcycle"], begins, "checkpoint.load"
    yield ["log.wandb_project"], log.wandb != "off", "log.wandb=online or offline"
