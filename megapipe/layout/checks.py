"""Refuses keys that conflict. Each error is one line that says what would be right."""

from collections.abc import Callable

from megapipe.config.activations import ActivationsConfig
from megapipe.config.config import (
    USUAL_WARMUP,
    Config,
    LogConfig,
    OptimizerConfig,
    TrainConfig,
)
from megapipe.config.keys import texts_of
from megapipe.config.plan import PlanConfig
from megapipe.config.update_rules import RULES, declaration
from megapipe.errors import ConfigError
from megapipe.layout.data_checks import check_data
from megapipe.layout.devices import device
from megapipe.layout.key_effects import check_kernels
from megapipe.layout.moe.checks import check_experts
from megapipe.layout.user_lr_schedule import UserLRSchedule, warms_up
from megapipe.model.gpt.hf.config import row_of
from megapipe.model.interface import Feature, ModelSpec
from megapipe.model.user_loss import load_loss
from megapipe.text import count_noun, divisors_hint, join_or, nearest_multiples, plural
from megapipe.util.dtypes import Dtype
from megapipe.util.urls import check_folder, check_url, is_remote
from megapipe.util.user_code import is_class_name


def check_urls(config: Config) -> None:
    """Raise :class:`ConfigError` for a URL with secrets, before any value is printed."""
    for key, text in texts_of(config.model_dump()):
        check_url(key, text)


def check(config: Config, family: ModelSpec, dp: int, processes: int) -> None:
    """Check a resolved configuration; raise :class:`ConfigError` for the first problem."""
    _check_support(config, family)
    family.check()
    load_loss(family.conditions)  # raises if there is no such loss
    _check_sequence(config)
    check_data(config.data)
    declaration(config.optimizer.rule)  # raises if there is no such rule
    _check_optimizer(config.optimizer, config.train.steps, dp, config.parallel.cp)
    _check_post_validation(config)
    _check_look_ahead(config)
    _check_precision(config.optimizer, config.model.dtype)
    check_experts(config, dp)
    check_kernels(config, family.kernel_needs, family.name)
    _check_activations(config.activations, family)
    _check_watched_steps(config.log)
    check_device(config.plan)
    _check_stop(config.train)
    _check_checkpoints(config, processes)
    _check_export(config)
    _check_numbers(config)


def _check_checkpoints(config: Config, processes: int) -> None:
    folder, load = config.checkpoint.url, config.checkpoint.load
    if load is not None and is_remote(load):
        check_folder("checkpoint.load", load)
    if folder is None:
        return
    if not is_remote(folder):
        raise ConfigError(
            f"checkpoint.url={folder}: expected a URL such as s3://bucket/path, or null; a local "
            "folder is run.folder"
        )
    check_folder("checkpoint.url", folder)
    if folder.startswith("memory:") and processes > 1:
        raise ConfigError(
            f"checkpoint.url={folder} is the memory of one of {processes}: expected a store "
            "that all processes reach"
        )


def _check_export(config: Config) -> None:
    """Refuse ``checkpoint.export_every`` for a model that no Hugging Face class can represent."""
    every, model = config.checkpoint.export_every, config.model
    if not every or model.vocab_size is None or is_class_name(model.source):
        return
    if model.source is not None:
        raise ConfigError(
            f"checkpoint.export_every={every}: no Hugging Face class expresses "
            f"model.source={model.source}: expected 0"
        )
    try:
        row_of(model)
    except ConfigError as error:
        raise ConfigError(f"checkpoint.export_every={every}: {error}") from None


def _check_numbers(config: Config) -> None:
    """Refuse to skip samples if the sample order has only as many samples as the run takes."""
    health = config.health
    if config.data.sample_format != "megatron":
        return
    if health.skip_samples:
        raise ConfigError(
            f"health.skip_samples={health.skip_samples}: data.sample_format=megatron orders "
            "exactly as many samples as the run takes: expected []"
        )
    if "rewind" in health.actions:
        key = "non_finite" if health.non_finite == "rewind" else "spike"
        raise ConfigError(
            f"health.{key}=rewind skips samples, but data.sample_format=megatron orders "
            "exactly as many as the run takes: expected stop or skip"
        )


def _check_support(config: Config, family: ModelSpec) -> None:
    """Refuse features that the model does not support, by their keys."""
    parallel, activations, kernels = config.parallel, config.activations, config.kernels
    policies, saves_attention = activations.policies, activations.keep_attention
    uses: list[tuple[Feature, bool, str, str]] = [
        ("tp", parallel.tp > 1, f"parallel.tp={parallel.tp}", "1"),
        ("context", parallel.cp > 1, f"parallel.cp={parallel.cp}", "1"),
        ("context", saves_attention, "activations.keep_attention=true", "false"),
        (
            "sequence_parallel",
            parallel.sequence_parallel,
            "parallel.sequence_parallel=true",
            "false",
        ),
        ("selective", "selective" in policies, "activations.policy=selective", "keep or stage"),
        ("full", "full" in policies, "activations.policy=full", "keep or stage"),
        ("offload", bool(activations.offload), f"activations.offload={activations.offload}", "[]"),
        ("compile", kernels.compile, "kernels.compile=true", "false"),
        ("document_mask", config.data.document_mask, "data.document_mask=true", "false"),
        (
            "document_mask",
            config.data.packs,
            f"data.sample_format={config.data.sample_format}",
            "stateless",
        ),
        (
            "loss_chunk",
            bool(kernels.loss_chunk_tokens),
            f"kernels.loss_chunk_tokens={kernels.loss_chunk_tokens}",
            "0",
        ),
        ("lora", config.lora.rank is not None, f"lora.rank={config.lora.rank}", "null"),
    ]
    supported = family.supports
    lacking = [each for each in uses if each[1] and each[0] not in supported]
    if lacking:
        what = ", ".join(setting for _, _, setting, _ in lacking)
        right = ", ".join(f"{setting.partition('=')[0]}={value}" for *_, setting, value in lacking)
        if len(lacking) == 1:
            right = lacking[0][-1]
        reasons = dict.fromkeys(filter(None, (family.why_not(each[0]) for each in lacking)))
        why = f" ({'; '.join(reasons)})" if reasons else ""
        it = "it" if len(lacking) == 1 else "them"
        raise ConfigError(f"{what}: {family.name} has no support for {it}{why}; expected {right}")
    if config.train.loss_function is not None and kernels.loss_chunk_tokens:
        raise ConfigError(
            f"kernels.loss_chunk_tokens={kernels.loss_chunk_tokens}: "
            f"train.loss_function={config.train.loss_function} needs all logits at once; expected "
            "null"
        )


def check_slices(config: Config, family: ModelSpec, slices: int) -> None:
    """Refuse slices of sequences if the model cannot compute them."""
    if slices > 1 and "slices" not in family.supports:
        reason = family.why_not("slices")
        why = f" ({reason})" if reason else ""
        raise ConfigError(
            f"pipeline.schedule={config.pipeline.schedule} cuts sequences into slices, which "
            f"{family.name} does not support{why}: expected a schedule of whole sequences"
        )


def _check_sequence(config: Config) -> None:
    length, tp = config.train.sequence_length, config.parallel.tp
    if config.parallel.sequence_parallel and length % tp:
        raise ConfigError(
            f"train.sequence_length={length} is not divisible by parallel.tp={tp}, which "
            f"parallel.sequence_parallel needs: {nearest_multiples(length, tp)}"
        )


def _check_optimizer(optimizer: OptimizerConfig, steps: int, dp: int, cp: int) -> None:
    if optimizer.shard_group_size is not None and dp * cp % optimizer.shard_group_size:
        copies = f"dp {dp}" + (f" x cp {cp}" if cp > 1 else "")
        raise ConfigError(
            f"optimizer.shard_group_size={optimizer.shard_group_size} does not divide {copies}: "
            f"{divisors_hint('shard_group_size', dp * cp, optimizer.shard_group_size)}"
        )
    decays = optimizer.schedule != "constant" and not optimizer.is_user_schedule
    if optimizer.min_lr > optimizer.lr and decays:
        raise ConfigError(
            f"optimizer.min_lr={optimizer.min_lr} is above the peak, optimizer.lr={optimizer.lr}: "
            "expected at most that"
        )
    decay = optimizer.least_decay(steps)
    if decay > steps:
        raise ConfigError(
            f"optimizer.decay_steps={decay} is more than train.steps={steps}: expected at most that"
        )
    warmup = optimizer.warmup(steps)
    if warmup + decay > steps:
        most = str(steps - decay)
        meant = ""
        if isinstance(optimizer.warmup_steps, float):
            meant = f" ({count_noun(warmup, 'step')})"
            share = (steps - decay) * 10**6 // steps / 10**6
            most = f"{share:g} ({count_noun(steps - decay, 'step')})"
        raise ConfigError(
            f"optimizer.warmup_steps={optimizer.warmup_steps}{meant} leaves too few of train.steps="
            f"{steps} for a decay of {decay} or more: expected at most {most}"
        )
    if optimizer.is_user_schedule:
        UserLRSchedule(optimizer, steps).check()


def _check_precision(optimizer: OptimizerConfig, dtype: Dtype) -> None:
    if optimizer.master_weights == "none" and dtype != "bf16":
        raise ConfigError(
            f"optimizer.master_weights=none is for model.dtype=bf16, not {dtype}: expected fp32 "
            "(fp32 and fp64 weights are their own masters anyway)"
        )
    if optimizer.state_dtype == "bf16" and dtype == "fp64":
        raise ConfigError(
            "optimizer.state_dtype=bf16 is not possible with model.dtype=fp64: expected fp32, "
            "which then means fp64"
        )


def _check_post_validation(config: Config) -> None:
    optimizer = config.optimizer
    if not optimizer.post_validation:
        return
    elementwise = join_or([name for name in RULES if RULES[name].elementwise])
    for wrong, expected in (
        (
            not declaration(optimizer.rule).elementwise,
            f"optimizer.rule={elementwise}, not {optimizer.rule}",
        ),
        (optimizer.zero == 3, "optimizer.zero=0, 1 or 2, not 3"),
        (optimizer.offload != "none", f"optimizer.offload=none, not {optimizer.offload}"),
        (config.pipeline.transport == "in_process", "pipeline.transport=process_group"),
        (config.pipeline.schedule == "auto", "a pipeline.schedule other than auto"),
    ):
        if wrong:
            raise ConfigError(f"optimizer.post_validation=true needs {expected}")


def _check_look_ahead(config: Config) -> None:
    if config.optimizer.weight_prediction:
        check_direction(config, f"optimizer.weight_prediction={config.optimizer.weight_prediction}")


def check_direction(config: Config, what: str) -> None:
    """Raise :class:`ConfigError` if weights cannot be predicted from master weights and optimizer
    states. `what`: the setting that asks for the prediction, for the message."""
    optimizer = config.optimizer
    rule, declared = optimizer.rule, declaration(optimizer.rule)
    with_direction = join_or([name for name in RULES if RULES[name].has_direction])
    for wrong, expected in (
        (not declared.has_direction, f"optimizer.rule={with_direction}, not {rule}"),
        (
            declared.kept(optimizer.rule_options) != declared.states,
            f"optimizer.options.momentum above 0 with {rule}",
        ),
        (config.model.dtype == "fp16", "model.dtype=bf16, fp32 or fp64, not fp16"),
        (
            optimizer.master_weights == "none" and config.model.dtype == "bf16",
            "optimizer.master_weights=fp32, not none",
        ),
        (optimizer.state_dtype == "bf16", "optimizer.state_dtype=fp32, not bf16"),
        (optimizer.offload != "none", f"optimizer.offload=none, not {optimizer.offload}"),
        (optimizer.post_validation, "optimizer.post_validation=false"),
    ):
        if wrong:
            raise ConfigError(f"{what} needs {expected}")


def _check_watched_steps(log: LogConfig) -> None:
    for key, steps in (("timeline", log.timeline), ("profile", log.profile)):
        wrong = [step for step in steps if step < 1]
        if wrong:
            raise ConfigError(
                f"log.{key}={steps}: there is no step {wrong[0]}: expected steps counted from 1"
            )


def check_device(plan: PlanConfig) -> None:
    """Check that a device that is named is in the table; raise :class:`ConfigError`."""
    if plan.device is not None and device(plan.device) is None:
        raise ConfigError(
            f"plan.device={plan.device} is not known: expected a common GPU, as in H100 or "
            "A100-SXM4-80GB, or null with plan.device_gb and plan.peak_tflops"
        )


def shortened(config: Config) -> list[str]:
    """Return a note on each setting that has no effect, or less, because the run is short."""
    optimizer, train = config.optimizer, config.train
    notes = []
    warmup = optimizer.warmup(train.steps)
    short = optimizer.warmup_steps is None and warmup < USUAL_WARMUP
    if short and warms_up(optimizer, train.steps):
        notes.append(
            f"warm-up of {count_noun(warmup, 'step')}: the usual {USUAL_WARMUP} leave too few for "
            "the decay (optimizer.warmup_steps)"
        )
    last = train.last_step
    beyond = _watched_in_vain(
        config.log, lambda step: step > last, f"the run ends after step {last}"
    )
    return [*notes, *beyond]


def passed(log: LogConfig, first: int) -> list[str]:
    """Return a note on each key that asks for a timeline or profile of steps up to `first`: the
    resumed run does not repeat these steps."""
    return _watched_in_vain(log, lambda step: step <= first, f"the run resumes after step {first}")


def _watched_in_vain(log: LogConfig, is_left_out: Callable[[int], bool], why: str) -> list[str]:
    notes = []
    for key, steps in (("timeline", log.timeline), ("profile", log.profile)):
        if out := [step for step in steps if is_left_out(step)]:
            which = f"{plural('step', len(out))} {', '.join(map(str, out))}"
            notes.append(f"no {key} of {which} (log.{key}): {why}")
    return notes


def _check_stop(train: TrainConfig) -> None:
    if train.stop_after is not None and train.stop_after > train.steps:
        raise ConfigError(
            f"train.stop_after={train.stop_after} is more than train.steps={train.steps}: expected "
            "at most that, or null"
        )


def _check_activations(activations: ActivationsConfig, family: ModelSpec) -> None:
    """Refuse modules in ``activations.modules`` that the model does not have."""
    modules = "norm, attention, mlp_activation"
    if "selective" in activations.policies and not activations.modules:
        raise ConfigError(
            "activations.modules=[]: activations.policy=selective has nothing to recompute: "
            f"expected some of {modules}"
        )
    if "experts" in activations.modules and not family.experts():
        raise ConfigError(
            f"activations.modules={activations.modules}: no layer has experts "
            f"(model.moe.num_experts=null): expected some of {modules}"
        )


def check_compile(config: Config, slices: int) -> None:
    """Refuse settings that compiled blocks do not support. `slices`: slices per sequence."""
    if not config.kernels.compile:
        return
    activations = config.activations
    for wrong, expected in (
        (slices > 1, f"whole sequences, but pipeline.schedule cuts them into {slices} slices"),
        (
            "selective" in activations.policies,
            "activations.policy=keep, full or stage, not selective",
        ),
        (activations.offload, "activations.offload=[]"),
        (config.lora.rank, f"lora.rank=null, not {config.lora.rank}"),
    ):
        if wrong:
            raise ConfigError(f"kernels.compile=true needs {expected}")
