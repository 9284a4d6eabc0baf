"""The share of a micro-batch's activations that its input gradients free."""

from collections.abc import Sequence
from fractions import Fraction

from megapipe.config import Config
from megapipe.context.split import Split
from megapipe.layers.policy import Span
from megapipe.layout.layout import DeviceKind
from megapipe.model.interface import Dispatched, Family, Sizes
from megapipe.model.partition import StageSpec

_PARTS = 1000


def sizes_of(config: Config, device: DeviceKind, split: Split, sequence: int, rows: int) -> Sizes:
    """A piece of so many `rows`, and so many positions on a context-parallel rank."""
    parallel, experts = config.parallel, config.experts
    alone, over = (1, 1), (parallel.ep, parallel.etp)
    fetched, rowed = (over, alone) if experts.dispatch == "fetch" else (alone, over)
    return Sizes(
        sequence,
        rows,
        parallel.tp,
        parallel.sequence_parallel,
        device == "cuda",
        cp=parallel.cp,
        ep=rowed[0],
        etp=rowed[1],
        dispatch=Dispatched(
            form=experts.dispatch,
            node=experts.node,
            chunks=experts.number_of_chunks,
            slots=experts.slots,
            fetched=fetched,
            codec=experts.codec,
            padded=config.train.sequence_length if experts.pad else None,
        ),
        ulysses=split.ulysses,
    )


def freed_share(
    config: Config,
    family: Family,
    device: DeviceKind,
    split: Split,
    stages: Sequence[StageSpec],
    spans: Sequence[Sequence[Span]],
) -> Fraction:
    """The share that an I frees at every stage, in whole thousandths; W frees the rest.

    0 where a stage's weight gradients wait with as much as it has saved, or more.
    """
    length = config.train.sequence_length // config.parallel.cp
    sizes = sizes_of(config, device, split, length, config.train.microbatch)
    held = [family.held(*stage, sizes) for stage in zip(stages, spans, strict=True)]
    return min(Fraction(_thousandths(each.device, each.queued), _PARTS) for each in held)


def _thousandths(saved: int, queued: int) -> int:
    """Of what is saved from F to I, those that are free afterwards, rounded down."""
    return max(0, saved - queued) * _PARTS // saved if saved else 0
