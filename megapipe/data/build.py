"""Batches of a run, from its configuration and its corpora."""

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
    MARKS,
    FillInTheMiddle,
    PackedInTheMiddle,
    WindowsInTheMiddle,
    marks_of,
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
from megapipe.util.left_out import SkippedSamples


class ConsumedData(NamedTuple):
    """How far a run has come in its data, by the checkpoint that it goes on from."""

    step: int = 0
    samples: int = 0
    order: str = ""
    """:attr:`~megapipe.data.batch.Batches.order` of the batches that dealt them; empty if there was
    nothing to keep."""
    left_out: SkippedSamples = SkippedSamples()
    """Numbers of samples that were passed over, or will be."""


class HeldOutBatches(NamedTuple):
    """Batches of a set that losses are computed on."""

    name: str
    split: Split
    batches: Batches


def build_batches(
    config: Config, tokenizer: Tokenizer, sources: Sources, past: ConsumedData | None = None
) -> tuple[Batches, list[HeldOutBatches]]:
    """Training batches and those of the sets that are held out.

    Training never ends, unless a mixture does. Each held-out set has every token as a label once.
    Its order is shuffled, so that its first samples stand for all, and is the same for every
    `run.seed`.

    Raises:
        DataError: a split is damaged, or too short for one sample, or a mixture for the run.
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
            mask_document_ends=config.data.mask_document_ends,
            eod=tokenizer.eod,
        )

    def scored(held_out: HeldOut) -> HeldOutBatches:
        name, split = held_out.name, held_out.split
        with _named_by_its_key(config.data, name, split):
            dataset = _cut(held_out.part, config, tokenizer, keep_last=True, change=None, room=room)
        source = SampleSource(dataset, partial(_once, 0, len(dataset)), name)
        return HeldOutBatches(name, split, batches([source]))

    parts = {name: _trained_on(corpus) for name, corpus in sources.training.items()}
    if config.data.samples == "megatron":
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
    """The change of a source's documents, by its name; None where they stay as they are."""
    data = config.data
    if not data.fim_rate:
        return lambda source: None
    marks = marks_of(data, tokenizer)
    rates, seed = (data.fim_rate, data.fim_spm_rate), config.run.seed
    return lambda source: FillInTheMiddle(marks, tokenizer.eod, *rates, seed, source)


@contextmanager
def _named_by_its_key(data: DataConfig, name: str, split: Split = "train") -> Iterator[None]:
    """Name a source that is too short for a sample by its keys, where its file is in the cache."""
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
            f"what data.validation_fraction={data.validation_fraction:g} holds out of {source} "
            f"{error.what}, or a larger data.validation_fraction, or data.validation.NAME"
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
    if data.samples == "supervised":
        packing = open_packing(part, PackingRule(length, cut=False), Path(data.cache))
        room.hold(packing)
        return ExampleDataset(part, packing, length, eod, tokenizer.vocab_size)
    if data.samples == "packed":
        _check_whole(part, data)
        rule = PackingRule(length, spare=0 if change is None else MARKS)
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
            "has no whole document, as its only one with tokens is divided by "
            f"data.validation_fraction, and data.samples={data.samples} takes whole ones: "
            "expected data.validation.NAME, or data.validation_fraction=0",
        )


def _samples(config: Config, past: ConsumedData) -> int:
    """Samples of the whole run, those that are behind it included."""
    train = config.train
    return train.batches.after(past.samples, train.steps - past.step)


def _in_megatrons_order(
    config: Config, parts: Mapping[str, Stream | Dataset], past: ConsumedData, room: MemoryBudget
) -> tuple[list[SampleSource], Blend | None, str]:
    """The sources as Megatron-LM's data sets for a run of so many samples, their blend, and what a
    checkpoint keeps: how many samples the order is made for, which decides it."""
    data, train, cache = config.data, config.train, Path(config.data.cache)
    needed = _samples(config, past)
    samples = int(past.order) if past.order.isdecimal() else needed
    if needed > samples:
        raise DataError(
            f"data.samples=megatron: the order of this run was made for {samples} samples, which "
            f"its length decides, and it would take {needed}: expected fewer train.steps"
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
        assert isinstance(part, Stream), "a data set of the user's has an order of its own"
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
            f"data.samples=megatron: a source has {n} samples, and number {number} is asked for: "
            "its order was made for fewer train.steps"
        )
    return number


def _once(seed: int, n: int, number: int) -> int | None:
    return order(seed, n, number) if number < n else None


def _mixture(config: Config, training: Sequence[SampleSource], past: ConsumedData) -> Mixture:
    """The mixture of a run, whose sources have these data sets.

    Weights change at steps of the run, at whichever sample they begin. What the checkpoint's recipe
    has dealt stays dealt: where another one goes on, it begins at the checkpoint's sample.
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
        recipe = _joined(recipe, past, names)
    mixture = Mixture(recipe, names)
    mixture.check(past.left_out.number_after(_samples(config, past)))
    return mixture


def _joined(recipe: MixtureRecipe, past: ConsumedData, names: Sequence[str]) -> MixtureRecipe:
    """A recipe that goes on where the checkpoint's ended, or that one, if both go on alike.

    Recipes of one run change at the numbers that samples would have if none had been left out: so
    what is left out later changes none of them. A new recipe begins at the next number.
    """
    try:
        stored = MixtureRecipe.of(past.order)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError("the checkpoint does not say how its mixture was dealt") from error
    if stored.goes_on(past.samples, recipe):
        return stored
    start = past.left_out.number_after(past.samples)
    weights = [(first + start - past.samples, some) for first, some in recipe.weights]
    before = Mixture(stored, names).taken(start)
    return recipe._replace(weights=weights, start=start, before=before)


def _most(tokens: int | None, epochs: float | None, samples: int, length: int) -> int | None:
    """Samples that `tokens` and `epochs` allow of a source that has `samples`."""
    limits = []
    if tokens is not None:
        limits.append(tokens // length)
    if epochs is not None:
        limits.append(int(Fraction(str(epochs)) * samples))
    return min(limits, default=None)


def _weights(
    data: DataConfig, samples: Sequence[int], most: Sequence[int | None]
) -> list[tuple[int, list[float]]]:
    """The steps at which weights change, the first one 0, with the weights from then on."""
    given = [source.weight for source in data.mixture.values() if source.weight is not None]
    if given:  # then all have one
        return weight_plan(given)
    sizes = zip(samples, most, strict=True)
    return [(0, [float(n if limit is None else limit) for n, limit in sizes])]
