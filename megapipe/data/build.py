"""Batches of a run, made from the run's configuration and corpora."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.config.data import DataConfig, source_key
from megapipe.data.batch import Batches, Mixing, SampleSource
from megapipe.data.dataset import Corpus, Dataset, Split, Stream, TokenDataset, TooShort
from megapipe.data.fill_in_the_middle import (
    NUM_SENTINELS,
    FillInTheMiddle,
    PackedInTheMiddle,
    WindowsInTheMiddle,
    fim_tokens_of,
)
from megapipe.data.indices import (
    Blend,
    BlendSizes,
    IndexedDataset,
    Request,
    open_blend,
    open_indices,
)
from megapipe.data.mixture import Mixture, MixtureRecipe, tempered, weight_plan
from megapipe.data.order import order
from megapipe.data.packing import PackedDataset, PackingRule, open_packing
from megapipe.data.sources import HeldOut, Sources
from megapipe.data.stored import MemoryBudget
from megapipe.data.supervised import ExampleDataset
from megapipe.data.tokenizer import Tokenizer
from megapipe.errors import CheckpointError, DataError
from megapipe.util.skipped_samples import SkippedSamples


class ConsumedData(NamedTuple):
    """How much data a run has consumed, as recorded in the checkpoint that it resumes from."""

    step: int = 0
    samples: int = 0
    order: str = ""
    """:attr:`~megapipe.data.batch.Batches.order` of the consumed samples; "" if there are none."""
    skipped_samples: SkippedSamples = SkippedSamples()
    """Numbers of samples that the run has skipped or will skip."""


class HeldOutBatches(NamedTuple):
    """Batches of a held-out set, on which validation and test losses are computed."""

    name: str
    split: Split
    batches: Batches


def build_batches(
    config: Config, tokenizer: Tokenizer, sources: Sources, past: ConsumedData | None = None
) -> tuple[Batches, list[HeldOutBatches]]:
    """Return the training batches, and the batches of each held-out set.

    Training batches never end, unless a mixture is used up. In a held-out set every token is a
    label once. The set is shuffled, so that its first samples are representative, in an order that
    does not depend on `run.seed`.

    Raises:
        DataError: a split is damaged or too short for one sample, or a mixture is too short for the
            run.
    """
    past = past or ConsumedData()
    room = MemoryBudget()

    def batches(
        given: Sequence[SampleSource], mixture: Mixing | None = None, order: str = ""
    ) -> Batches:
        return Batches(
            given,
            mixture,
            order=order,
            vocab_size=config.model.vocab_size or tokenizer.vocab_size,
            mask_document_ends=config.data.eod_mask_loss,
            eod=tokenizer.eod,
        )

    def scored(held_out: HeldOut) -> HeldOutBatches:
        name, split = held_out.name, held_out.split
        with _named_by_its_key(config.data, name, split):
            dataset = _cut(held_out.part, config, tokenizer, keep_last=True, change=None, room=room)
        source = SampleSource(dataset, partial(_once, 0, len(dataset)), name)
        return HeldOutBatches(name, split, batches([source]))

    parts = {name: _trained_on(corpus) for name, corpus in sources.training.items()}
    if config.data.sample_format == "megatron":
        training = batches(*_in_megatrons_order(config, parts, past, room))
    else:
        change = _rearranging(config, tokenizer)
        cut = {}
        for name, part in parts.items():
            with _named_by_its_key(config.data, name):
                cut[name] = _cut(
                    part, config, tokenizer, keep_last=False, change=change(name), room=room
                )
        shuffled = [
            SampleSource(dataset, partial(order, config.run.seed, len(dataset)), name)
            for name, dataset in cut.items()
        ]
        mixture = _mixture(config, shuffled, past) if config.data.mixture else None
        training = batches(shuffled, mixture, mixture.recipe.text if mixture is not None else "")
    return training, [scored(each) for each in sources.held_out()]


def _trained_on(corpus: Corpus) -> Stream | Dataset:
    part = corpus.part("train")
    assert part is not None
    return part


def _rearranging(config: Config, tokenizer: Tokenizer) -> Callable[[str], FillInTheMiddle | None]:
    """Return a function that maps a source's name to the fill-in-the-middle rearrangement of its
    documents, or to None if documents are not rearranged."""
    data = config.data
    if not data.fim_rate:
        return lambda source: None
    fim_tokens = fim_tokens_of(data, tokenizer)
    rates, seed = (data.fim_rate, data.fim_spm_rate), config.run.seed
    return lambda source: FillInTheMiddle(fim_tokens, tokenizer.eod, *rates, seed, source)


@contextmanager
def _named_by_its_key(data: DataConfig, name: str, split: Split = "train") -> Iterator[None]:
    """Turn :class:`TooShort` into an error that names the configuration key, not the path."""
    try:
        yield
    except TooShort as error:
        held_out = data.validation if split == "validation" else data.test
        if split != "train" and held_out:
            raise DataError(f"data.{split}.{name}={held_out[name]} {error.what}") from error
        source = f"{source_key(name)}={data.sources[name].source}"
        if split == "train":
            raise DataError(f"{source} {error.what}") from error
        if data.split is not None:
            where = f"the {split} part of {source} (data.split={data.split})"
            raise DataError(f"{where} {error.what}") from error
        raise DataError(
            f"the validation part of {source} "
            f"(data.validation_fraction={data.validation_fraction:g}) {error.what}, or a "
            "larger data.validation_fraction, or data.validation.NAME"
        ) from error


def _cut(
    part: Stream | Dataset,
    config: Config,
    tokenizer: Tokenizer,
    *,
    keep_last: bool,
    change: FillInTheMiddle | None,
    room: MemoryBudget,
) -> Dataset:
    if not isinstance(part, Stream):
        return part
    data, length, eod = config.data, config.train.sequence_length, tokenizer.eod
    if data.sample_format == "supervised":
        packing = open_packing(part, PackingRule(length, cut=False), Path(data.cache))
        room.hold(packing)
        return ExampleDataset(part, packing, length, eod, tokenizer.vocab_size)
    if data.sample_format == "packed":
        _check_whole(part, data)
        rule = PackingRule(length, spare=0 if change is None else NUM_SENTINELS)
        packing = open_packing(part, rule, Path(data.cache))
        room.hold(packing)
        if change is None:
            return PackedDataset(part.file, packing, length, eod)
        return PackedInTheMiddle(part.file, packing, length, eod, change)
    whole = part.positions == range(len(part.file.tokens))
    span = None if whole else part.positions
    windows = TokenDataset(part.file, length, span, keep_last=keep_last)
    return windows if change is None else WindowsInTheMiddle(windows, change)


def _check_whole(part: Stream, data: DataConfig) -> None:
    if not part.sequences:
        raise TooShort(
            part.file.path,
            "has no complete document: data.validation_fraction divides the only one with "
            f"tokens, but data.sample_format={data.sample_format} needs complete documents: "
            "expected data.validation.NAME, or data.validation_fraction=0",
        )


def _samples(config: Config, past: ConsumedData) -> int:
    """Return the number of samples of the whole run, including those consumed before."""
    train = config.train
    return train.batches.after(past.samples, train.steps - past.step)


def _in_megatrons_order(
    config: Config, parts: Mapping[str, Stream | Dataset], past: ConsumedData, room: MemoryBudget
) -> tuple[list[SampleSource], Blend | None, str]:
    """Return the sources in Megatron-LM's order of samples, and their blend. Also return the
    order's number of samples, as text for the checkpoint."""
    data, train, cache = config.data, config.train, Path(config.data.cache)
    needed = _samples(config, past)
    samples = int(past.order) if past.order.isdecimal() else needed
    if needed > samples:
        raise DataError(
            f"data.sample_format=megatron: this run's order has {samples} samples, fixed at "
            f"its first start, but train.steps needs {needed}: expected fewer train.steps"
        )
    given = [source.weight for source in data.mixture.values() if source.weight is not None]
    blend = None
    requests: list[int | None] = [None] * len(parts) if data.mixture else [samples]
    if given:
        (_, weights), *_ = weight_plan(given)
        if data.temperature != 1:
            weights = tempered(weights, data.temperature)
        blend = BlendSizes.weighted(weights, samples)
        requests = [*blend.requests]
    found = []
    for (name, part), request in zip(parts.items(), requests, strict=True):
        assert isinstance(part, Stream), "a user data set defines its own order"
        wanted = Request(part.sequences, train.sequence_length, request, config.run.seed)
        with _named_by_its_key(data, name):
            _check_whole(part, data)
            indices = open_indices(part.file, wanted, cache)
        room.hold([part.file.offsets, indices.documents, indices.samples, indices.shuffle])
        dataset = IndexedDataset(part.file, indices, train.sequence_length)
        found.append(SampleSource(dataset, partial(_in_order, len(dataset)), name))
    if not data.mixture:
        return found, None, str(samples)
    if blend is None:
        blend = BlendSizes.by_size([len(source.dataset) for source in found], samples)
    mixing = Blend(open_blend(blend, cache), len(found))
    mixing.check(needed)
    return found, mixing, str(samples)


def _in_order(n: int, number: int) -> int:
    if number >= n:
        raise DataError(
            f"data.sample_format=megatron: a source has {n} samples, but sample {number} is "
            "requested: its order was made for fewer train.steps"
        )
    return number


def _once(seed: int, n: int, number: int) -> int | None:
    return order(seed, n, number) if number < n else None


def _mixture(config: Config, training: Sequence[SampleSource], past: ConsumedData) -> Mixture:
    """Return the mixture of a run from the sources `training`.

    The configuration gives the steps at which weights change; the recipe needs the number of the
    first sample of each of these steps. In a resumed run, a changed recipe applies only to the
    samples after the checkpoint.
    """
    data, train = config.data, config.train
    samples = [len(source.dataset) for source in training]
    most = [
        _most(given.tokens, given.epochs, n, train.sequence_length)
        for given, n in zip(data.mixture.values(), samples, strict=True)
    ]
    for source, limit in zip(training, most, strict=True):
        if limit == 0:
            raise DataError(
                f"data.mixture.{source.name}: tokens and epochs leave less than one sample of "
                f"train.sequence_length={train.sequence_length}"
            )
    plan = [
        (step, tempered(some, data.temperature)) for step, some in _weights(data, samples, most)
    ]
    now = next(some for step, some in reversed(plan) if step <= past.step)
    coming = [
        (train.batches.after(past.samples, step - past.step), some)
        for step, some in plan
        if step > past.step
    ]
    names = [source.name for source in training]
    recipe = MixtureRecipe([(past.samples, now), *coming], most, past.samples)
    if past.samples:
        recipe = _resumed(recipe, past, names)
    mixture = Mixture(recipe, names)
    mixture.check(past.skipped_samples.number_after(_samples(config, past)))
    return mixture


def _resumed(recipe: MixtureRecipe, past: ConsumedData, names: Sequence[str]) -> MixtureRecipe:
    """Return the checkpoint's recipe if `recipe` equals it after the checkpoint; else return
    `recipe`, moved so that it begins with the next sample.

    The sample numbers at which a recipe changes weights are computed as if no sample were skipped,
    so that samples skipped later do not move them. The number at which `recipe` begins includes the
    samples that the run has skipped.
    """
    try:
        stored = MixtureRecipe.of(past.order)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError("the checkpoint does not record how its mixture was drawn") from error
    if stored.equals_from(past.samples, recipe):
        return stored
    start = past.skipped_samples.number_after(past.samples)
    weights = [(first + start - past.samples, some) for first, some in recipe.weights]
    before = Mixture(stored, names).taken(start)
    return recipe._replace(weights=weights, start=start, before=before)


def _most(tokens: int | None, epochs: float | None, samples: int, length: int) -> int | None:
    """Return the maximum number of samples that `tokens` and `epochs` allow from a source."""
    limits = []
    if tokens is not None:
        limits.append(tokens // length)
    if epochs is not None:
        limits.append(int(Fraction(str(epochs)) * samples))
    return min(limits, default=None)


def _weights(
    data: DataConfig, samples: Sequence[int], most: Sequence[int | None]
) -> list[tuple[int, list[float]]]:
    """Return pairs of a step and the weights of all sources from it on; the first step is 0."""
    given = [source.weight for source in data.mixture.values() if source.weight is not None]
    if given:  # then every source has one
        return weight_plan(given)
    sizes = zip(samples, most, strict=True)
    return [(0, [float(n if limit is None else limit) for n, limit in sizes])]
