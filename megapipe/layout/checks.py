"""Keys that do not go together: each case is one line that says what would be right."""

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
from megapipe.config.update_rules import RULES, declaration
from megapipe.errors import ConfigError
from megapipe.layout.data_checks import check_data
from megapipe.layout.devices import device
from megapipe.layout.key_effects import check_kernels
from megapipe.layout.lr_plan import UserLRSchedule, warms_up
from megapipe.layout.moe.checks import check_experts
from megapipe.model.gpt.hf.config import row_of
from megapipe.model.interface import Feature, ModelSpec
from megapipe.model.own_loss import load_loss
from megapipe.util.dtypes import Dtype
from megapipe.util.urls import check_folder, check_url, is_remote
from megapipe.words import count_noun, divisors_hint, join_or, nearest_multiples, plural


def check_urls(config: Config) -> None:
    """Raise :class:`ConfigError` for a URL with secrets in it, before any value is told."""
    for key, text in texts_of(config.model_dump()):
        check_url(key, text)


def check(config: Config, family: ModelSpec, dp: int, processes: int) -> None:
    """Raise :class:`ConfigError` for the first thing in a resolved configuration that is wrong."""
    _check_support(config, family)
    family.check()
    load_loss(family.conditions)  # raises where there is none
    _check_sequence(config)
    check_data(config.data)
    declaration(config.optimizer.rule)  # raises where there is none
    _check_optimizer(config.optimizer, config.train.steps, dp, config.parallel.cp)
    _check_post_validation(config)
    _check_look_ahead(config)
    _check_precision(config.optimizer, config.model.dtype)
    check_experts(config, dp)
    check_kernels(config, family.kernel_needs, family.name)
    _check_activations(config.activations, family)
    _check_watched_steps(config.log)
    _check_device(config.log)
    _check_stop(config.train)
    _check_checkpoints(config, processes)
    _check_export(config)
    _check_numbers(config)


def _check_checkpoints(config: Config, processes: int) -> None:
    folder, load = config.checkpoint.folder, config.checkpoint.load
    if load is not None and is_remote(load):
        check_folder("checkpoint.load", load)
    if folder is None:
        return
    if not is_remote(folder):
        raise ConfigError(
            f"checkpoint.folder={folder}: expected a URL such as s3://bucket/path, or null; "
            "a local folder is run.folder"
        )
    check_folder("checkpoint.folder", folder)
    if folder.startswith("memory:") and processes > 1:
        raise ConfigError(
            f"checkpoint.folder={folder} is the memory of one process, of {processes}: expected a "
            "store that all of them reach"
        )


def _check_export(config: Config) -> None:
    """Find out whether a class of Hugging Face's can express the model before it is trained."""
    every, model = config.checkpoint.export_every, config.model
    if not every or model.vocab_size is None:
        return
    if model.source is not None:
        raise ConfigError(
            f"checkpoint.export_every={every}: no class of Hugging Face's expresses model.source="
            f"{model.source}: expected 0"
        )
    try:
        row_of(model)
    except ConfigError as error:
        raise ConfigError(f"checkpoint.export_every={every}: {error}") from None


def _check_numbers(config: Config) -> None:
    """Refuse to leave samples out of an order that is made for as many as a run takes."""
    numbers = config.numbers
    if config.data.samples != "megatron":
        return
    if numbers.skip_samples:
        raise ConfigError(
            f"numbers.skip_samples={numbers.skip_samples}: the order of data.samples=megatron has "
            "no more samples than the run takes; expected []"
        )
    if "rewind" in numbers.actions:
        key = "non_finite" if numbers.non_finite == "rewind" else "spike"
        raise ConfigError(
            f"numbers.{key}=rewind leaves samples out, and the order of data.samples=megatron has "
            "no more than the run takes; expected stop or skip"
        )


def _check_support(config: Config, family: ModelSpec) -> None:
    """Refuse by name what the model's family lacks."""
    parallel, activations, kernels = config.parallel, config.activations, config.kernels
    policies, keeps_attention = activations.policies, activations.keep_attention
    wishes: list[tuple[Feature, bool, str, str]] = [
        ("tp", parallel.tp > 1, f"parallel.tp={parallel.tp}", "1"),
        ("context", parallel.cp > 1, f"parallel.cp={parallel.cp}", "1"),
        ("context", keeps_attention, "activations.keep_attention=true", "false"),
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
        ("document_mask", config.data.packs, f"data.samples={config.data.samples}", "stateless"),
        ("loss_chunk", bool(kernels.loss_chunk), f"kernels.loss_chunk={kernels.loss_chunk}", "0"),
        ("lora", config.lora.rank is not None, f"lora.rank={config.lora.rank}", "null"),
    ]
    lacking = [
        (given, expected)
        for feature, wished, given, expected in wishes
        if wished and feature not in family.supports
    ]
    if lacking:
        what, right = ", ".join(given for given, _ in lacking), lacking[0][1]
        if len(lacking) > 1:
            right = ", ".join(f"{given.partition('=')[0]}={value}" for given, value in lacking)
        it = "it" if len(lacking) == 1 else "them"
        raise ConfigError(f"{what}: {family.name} has no support for {it}; expected {right}")
    if config.train.loss is not None and kernels.loss_chunk:
        raise ConfigError(
            f"kernels.loss_chunk={kernels.loss_chunk}: train.loss={config.train.loss} needs all "
            "logits at once; expected null"
        )


def check_slices(config: Config, family: ModelSpec, slices: int) -> None:
    """Refuse slices of sequences where the family cannot compute them."""
    if slices > 1 and "slices" not in family.supports:
        raise ConfigError(
            f"pipeline.schedule={config.pipeline.schedule} cuts sequences into slices, and "
            f"{family.name} has no support for it: expected a schedule of whole sequences"
        )


def _check_sequence(config: Config) -> None:
    length, tp = config.train.sequence_length, config.parallel.tp
    if config.parallel.sequence_parallel and length % tp:
        raise ConfigError(
            f"train.sequence_length={length} is not divisible by parallel.tp={tp}, which "
            f"parallel.sequence_parallel needs: {nearest_multiples(length, tp)}"
        )


def _check_optimizer(optimizer: OptimizerConfig, steps: int, dp: int, cp: int) -> None:
    if optimizer.shard_size is not None and dp * cp % optimizer.shard_size:
        copies = f"dp {dp}" + (f" x cp {cp}" if cp > 1 else "")
        raise ConfigError(
            f"optimizer.shard_size={optimizer.shard_size} does not divide {copies}: "
            f"{divisors_hint('shard_size', dp * cp, optimizer.shard_size)}"
        )
    decays = optimizer.schedule != "constant" and not optimizer.own_schedule
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
    if optimizer.own_schedule:
        UserLRSchedule(optimizer, steps).check()


def _check_precision(optimizer: OptimizerConfig, dtype: Dtype) -> None:
    if optimizer.master == "none" and dtype != "bf16":
        raise ConfigError(
            f"optimizer.master=none is for model.dtype=bf16, not {dtype}: expected fp32 (fp32 and "
            "fp64 weights are their own masters anyway)"
        )
    if optimizer.state_dtype == "bf16" and dtype == "fp64":
        raise ConfigError(
            "optimizer.state_dtype=bf16 does not go with model.dtype=fp64: expected fp32, which "
            "then means fp64"
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
        (config.pipeline.channels == "in_process", "pipeline.channels=process_group"),
        (config.pipeline.schedule == "auto", "a pipeline.schedule other than auto"),
    ):
        if wrong:
            raise ConfigError(f"optimizer.post_validation=true needs {expected}")


def _check_look_ahead(config: Config) -> None:
    if config.optimizer.look_ahead:
        check_direction(config, f"optimizer.look_ahead={config.optimizer.look_ahead}")


def check_direction(config: Config, what: str) -> None:
    """Refuse what a prediction of weights from masters and states cannot be made with; `what` is
    the key that asks for it."""
    optimizer = config.optimizer
    rule, declared = optimizer.rule, declaration(optimizer.rule)
    with_direction = join_or([name for name in RULES if RULES[name].has_direction])
    for wrong, expected in (
        (not declared.has_direction, f"optimizer.rule={with_direction}, not {rule}"),
        (
            declared.momentum and not optimizer.momentum,
            f"optimizer.momentum above 0 with {rule}",
        ),
        (config.model.dtype == "fp16", "model.dtype=bf16, fp32 or fp64, not fp16"),
        (
            optimizer.master == "none" and config.model.dtype == "bf16",
            "optimizer.master=fp32, not none",
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


def _check_device(log: LogConfig) -> None:
    if log.device is not None and device(log.device) is None:
        raise ConfigError(
            f"log.device={log.device} is not known: expected a common GPU, as in H100 or "
            "A100-SXM4-80GB, or null with log.device_gb and log.peak_tflops"
        )


def shortened(config: Config) -> list[str]:
    """Notes, one line each, on settings of which the run is too short to make full use."""
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
    """Notes, one line each, on settings for steps that a run which goes on after step `first` does
    not take again."""
    return _watched_in_vain(log, lambda step: step <= first, f"the run goes on after step {first}")


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
    """Refuse modules to run again where there are none of them."""
    modules = "norm, attention, mlp_activation"
    if "selective" in activations.policies and not activations.modules:
        raise ConfigError(
            "activations.modules=[] leaves activations.policy=selective nothing to run again: "
            f"expected some of {modules}"
        )
    if "experts" in activations.modules and not family.experts():
        raise ConfigError(
            f"activations.modules={activations.modules}: no layer has experts, which are for "
            f"model.moe.experts: expected some of {modules}"
        )


def check_compile(config: Config, slices: int) -> None:
    """Refuse what compiled blocks cannot do; the schedule cuts sequences into `slices`."""
    if not config.kernels.compile:
        return
    activations = config.activations
    for wrong, expected in (
        (slices > 1, f"whole sequences, and pipeline.schedule cuts them into {slices} slices"),
        (
            "selective" in activations.policies,
            "activations.policy=keep, full or stage, not selective",
        ),
        (activations.offload, "activations.offload=[]"),
        (config.lora.rank, f"lora.rank=null, not {config.lora.rank}"),
    ):
        if wrong:
            raise ConfigError(f"kernels.compile=true needs {expected}")
