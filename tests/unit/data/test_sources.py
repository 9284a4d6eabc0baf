"""What a run is trained, validated and tested on."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.data import build
from megapipe.data.batch import Batches
from megapipe.data.build import ConsumedData, HeldOutBatches, build_batches
from megapipe.data.indices import IndexedDataset
from megapipe.data.packing import PackedDataset
from megapipe.data.sources import Sources, load_sources
from megapipe.data.stored import MemoryBudget, StoredArray
from megapipe.data.tokenizer import ByteTokenizer
from megapipe.data.tokens import TokenWriter
from megapipe.data.tokens.format import token_type
from megapipe.errors import ConfigError, DataError
from megapipe.layout.resolve import resolve

L = 8
EOD = 256


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write token files `a`, `b` and `c` of 40, 20 and 10 documents of 10 tokens, all of one
    letter; and texts `t.jsonl`."""
    monkeypatch.chdir(tmp_path)
    for name, documents in (("a", 40), ("b", 20), ("c", 10)):
        with TokenWriter(Path(name), token_type(257), 257) as writer:
            for _ in range(documents):
                writer.add(np.array([ord(name)] * 9 + [EOD]))
    texts = [json.dumps({"text": f"t{i}" * 10}) for i in range(50)]
    Path("t.jsonl").write_text("\n".join(texts))


def config(*given: str) -> Config:
    usual = [f"train.sequence_length={L}", "train.steps=2", "train.global_batch=4"]
    usual.append("train.microbatch=1")
    return resolve(parse([*usual, *given]).config, 1, 257)[0]


def made(*given: str) -> tuple[Batches, list[HeldOutBatches]]:
    chosen = config(*given)
    return build_batches(chosen, ByteTokenizer(), load_sources(chosen, ByteTokenizer()))


def labels(batches: Batches) -> list[int]:
    rows = batches.rows(range(len(batches)))
    return sorted(rows.labels[rows.mask != 0].tolist())


def mixed(*given: str) -> Batches:
    """Return the batches of all sources, with nothing held out."""
    named = (f"data.mixture.{name}.source={name}" for name in "abc")
    return made("data.validation_fraction=0", *named, *given)[0]


def test_a_split_is_of_sequences_in_their_order() -> None:
    train, held_out = made("data.source=a", "data.split=8,1,1")
    assert [(each.name, each.split) for each in held_out] == [("", "validation"), ("", "test")]
    assert len(train) == (320 - 1) // L
    for each in held_out:
        assert len(labels(each.batches)) == 40 - 1
    only = made("data.source=a", "data.split=1,0")
    assert only[1] == []
    assert len(only[0]) == (400 - 1) // L


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ("0,1", "to train on: expected a larger first weight"),
        ("0.001,1,1", "to train on: expected a larger first weight"),
        ("999999,1,0", "to validate on: expected a larger second weight, or 0"),
        ("9,1,.01", "to test on: expected a larger third weight, or 0"),
    ],
)
def test_a_split_that_leaves_nothing_is_refused(split: str, words: str) -> None:
    said = rf"data.split={split} leaves nothing of the 40 sequences of a\.bin {words}"
    with pytest.raises(DataError, match=said):
        made("data.source=a", f"data.split={split}")


def test_sources_that_are_validated_on_are_whole() -> None:
    """Nothing is held out of sources that are trained on."""
    train, held_out = made(
        *("data.source=a", "data.validation.one=b", "data.validation.texts=t.jsonl"),
        *("data.test.two=c", "data.cache=cache"),
    )
    assert len(train) == (400 - 1) // L
    named = {(each.split, each.name): each.batches for each in held_out}
    assert list(named) == [("validation", "one"), ("validation", "texts"), ("test", "two")]
    assert len(labels(named["validation", "one"])) == 199
    assert len(labels(named["test", "two"])) == 99
    texts = sum(len(f"t{i}" * 10) + 1 for i in range(50))
    assert len(labels(named["validation", "texts"])) == texts - 1


def test_nothing_needs_to_be_held_out() -> None:
    for source, tokens in (("a", 400), ("t.jsonl", sum(len(f"t{i}" * 10) + 1 for i in range(50)))):
        train, held_out = made(f"data.source={source}", "data.validation_fraction=0")
        assert held_out == []
        assert len(train) == (tokens - 1) // L


def test_a_mixture_takes_from_its_sources() -> None:
    batches = mixed("data.mixture.a.weight=2", "data.mixture.b.weight=1", "data.mixture.c.weight=1")
    assert batches.names == ["a", "b", "c"]
    rows = batches.rows(range(400))
    letters = (rows.tokens != EOD).int().argmax(1)
    first = rows.tokens.gather(1, letters.unsqueeze(1)).squeeze(1)
    for number, source in enumerate("abc"):
        assert (rows.mask[first == ord(source)] == 1 + number).all()
    counts = [int((first == ord(source)).sum()) for source in "abc"]
    assert counts == batches.taken(400) == [200, 100, 100]
    taken: dict[str, list[int]] = {source: [] for source in "abc"}
    for sample in range(400):
        origin = batches.origin(sample)
        assert origin is not None
        taken[origin.source].append(origin.sample)
    assert sorted(taken["a"][:49]) == list(range(49)), "each once before any comes again"
    assert sorted(taken["c"][12:24]) == list(range(12))


def test_weights_are_sizes_by_default() -> None:
    """The sizes are numbers of whole samples: 49, 24 and 12."""
    assert mixed().taken(850) == pytest.approx([490, 240, 120], abs=2)
    assert mixed("data.temperature=2").taken(1000) == pytest.approx(
        [1000 * n**0.5 / (49**0.5 + 24**0.5 + 12**0.5) for n in (49, 24, 12)], abs=2
    )
    limited = mixed(
        "data.mixture.a.epochs=0.5", "data.mixture.b.tokens=90", "data.mixture.c.epochs=2"
    )
    assert limited.taken(24 + 11 + 24) == [24, 11, 24], "all are used up together"
    with pytest.raises(DataError, match="of a, b, c are used up after 59 samples"):
        limited.rows([59])


def test_a_mixture_that_does_not_last_is_refused_at_the_start() -> None:
    with pytest.raises(DataError, match="are used up after 85 samples: expected more"):
        mixed(*(f"data.mixture.{name}.epochs=1" for name in "abc"), "train.steps=30")


def test_weights_change_at_their_step() -> None:
    batches = mixed(
        *("data.mixture.a.weight=[[0, 1], [3, 0]]", "data.mixture.b.weight=[[0, 0], [3, 1]]"),
        "data.mixture.c.weight=[[0, 0], [5, 1]]",
    )
    assert [batches.taken(4 * step) for step in (3, 5, 7)] == [[12, 0, 0], [12, 8, 0], [12, 12, 4]]


def test_each_source_of_a_mixture_is_validated_by_itself() -> None:
    held_out = made(
        "data.mixture.x.source=a", "data.mixture.y.source=t.jsonl", "data.mixture.z.source=c"
    )[1]
    assert [each.name for each in held_out] == ["x", "y", "z"]
    assert len(held_out[0].batches) == 2


def continued(past: ConsumedData, *given: str) -> Batches:
    chosen = config("data.validation_fraction=0", *given)
    found = load_sources(chosen, ByteTokenizer())
    return build_batches(chosen, ByteTokenizer(), found, past)[0]


FADING = [
    *("data.mixture.a.source=a", "data.mixture.a.weight=[[0, 4], [3, 1], [9, 2]]"),
    *("data.mixture.b.source=b", "data.mixture.b.weight=1", "data.mixture.b.epochs=3"),
    "train.steps=12",
]


def dealt(batches: Batches, samples: range) -> list[tuple[str, int]]:
    origins = [batches.origin(sample) for sample in samples]
    return [(origin.source, origin.draw) for origin in origins if origin is not None]


def test_a_mixture_goes_on_as_it_began() -> None:
    first = continued(ConsumedData(), *FADING)
    again = continued(ConsumedData(5, 20, first.order), *FADING)
    assert again.order == first.order
    assert dealt(again, range(48)) == dealt(first, range(48))


@pytest.mark.parametrize(
    "changed",
    [
        ["train.global_batch=8"],
        ["train.batch_ramp=[2, 2, 30]"],
        ["data.temperature=2"],
        ["data.mixture.b.epochs=1"],
        ["data.mixture.a.weight=1"],
        ["data.mixture.a.weight=[[0, 4], [3, 1], [7, 2]]"],
    ],
)
def test_what_was_dealt_stays_dealt_when_the_recipe_changes(changed: list[str]) -> None:
    """Draws of each source go on without a gap, and weights change at the steps of the run."""
    first = continued(ConsumedData(), *FADING)
    again = continued(ConsumedData(5, 20, first.order), *FADING, *changed)
    assert again.taken(20) == first.taken(20)
    draws = dict(zip("ab", first.taken(20), strict=True))
    for source, draw in dealt(again, range(20, 40)):
        assert draw == draws[source]
        draws[source] += 1
    samples = config(*FADING, *changed).train.batches.after(20, 1)
    twice = continued(ConsumedData(6, samples, again.order), *FADING, *changed)
    assert dealt(twice, range(samples, 40)) == dealt(again, range(samples, 40))


def test_weights_that_change_later_do_so_at_their_step() -> None:
    """Five batches of 4 take 20 samples; from step 5 on batches are of 8."""
    plan = [
        *("data.mixture.a.source=a", "data.mixture.a.weight=[[0, 1], [7, 0]]"),
        *("data.mixture.b.source=b", "data.mixture.b.weight=[[0, 0], [7, 1]]", "train.steps=9"),
    ]
    first = continued(ConsumedData(), *plan)
    again = continued(ConsumedData(5, 20, first.order), *plan, "train.global_batch=8")
    assert [source for source, _ in dealt(again, range(20, 52))] == ["a"] * 16 + ["b"] * 16


def test_a_mixture_that_does_not_last_from_here_on() -> None:
    """24 samples of b are 3 times its own; those that are behind count."""
    only = ["data.mixture.b.source=b", "data.mixture.b.epochs=1", "train.steps=8"]
    first = continued(ConsumedData(), *only, "train.global_batch=1")
    continued(ConsumedData(7, 7, first.order), *only, "train.global_batch=16")
    with pytest.raises(DataError, match=r"of b are used up after 24 samples"):
        continued(ConsumedData(6, 6, first.order), *only, "train.global_batch=16")


def test_megatrons_order_is_that_of_the_beginning() -> None:
    given = ["data.source=a", "data.sample_format=megatron", "train.global_batch=8"]
    first = continued(ConsumedData(), *given, "train.steps=30")
    shorter = continued(ConsumedData(10, 80, first.order), *given, "train.steps=20")
    numbers = range(80, 160)
    assert (shorter.rows(numbers).tokens == first.rows(numbers).tokens).all()
    assert dealt(shorter, numbers) == dealt(first, numbers)
    with pytest.raises(DataError, match="has 240 samples, fixed at its first start, but"):
        continued(ConsumedData(10, 80, first.order), *given, "train.steps=31")


def test_how_much_is_padding_is_told() -> None:
    (line,) = continued(
        ConsumedData(), "data.source=a", "data.sample_format=packed", "train.sequence_length=7"
    ).notes()
    assert line == "packed 54 samples, of whose positions 4.76% are padding"
    assert list(continued(ConsumedData(), "data.source=a").notes()) == []


@pytest.mark.parametrize("temperature", ["0.001", "1e-9", "1e9"])
def test_temperatures_at_the_ends(temperature: str) -> None:
    mixed(f"data.temperature={temperature}").taken(100)
    mixed(
        f"data.temperature={temperature}",
        *(
            "data.mixture.a.weight=0.5",
            "data.mixture.b.weight=1e308",
            "data.mixture.c.weight=1e308",
        ),
    ).taken(100)


def sources(*given: str) -> Sources:
    return load_sources(config(*given), ByteTokenizer())


def test_a_digest_follows_what_is_trained_on() -> None:
    mixture = ["data.mixture.a.source=a", "data.mixture.b.source=b"]
    same = sources(*mixture)
    assert same.entropy is None
    weighted = [*mixture, "data.mixture.a.weight=1", "data.mixture.b.weight=1"]
    assert sources(*weighted).content == same.content, "the past says how they were dealt"
    for other in (
        ["data.mixture.b.source=b", "data.mixture.a.source=a"],
        ["data.mixture.a.source=a", "data.mixture.b.source=c"],
    ):
        assert sources(*other).content != same.content, other
    assert sources(*mixture, "data.test.c=c").content == same.content
    assert sources(*mixture, "data.test.c=c").everything != same.everything


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["data.source=a", "data.mixture.x.source=b"], "data.source=a and data.mixture (x): expec"),
        (["data.temperature=2"], "data.temperature=2.0 has no effect without data.mixture: expect"),
        (
            ["data.mixture.x.source=a", "data.mixture.y.source=b", "data.mixture.x.weight=1"],
            "data.mixture: a weight is missing for y: expected one for all sources, or for none",
        ),
        (
            [
                *("data.mixture.x.source=a", "data.mixture.x.weight=[[0, 1], [4, 0]]"),
                *("data.mixture.y.source=b", "data.mixture.y.weight=[[0, 1], [8, 0]]"),
            ],
            "data.mixture: from step 8 on all weights are 0",
        ),
        (
            ["data.source=a", "data.split=9,1", "data.validation.x=b"],
            "data.split=9,1 and data.validation both define",
        ),
        (
            ["data.source=t.jsonl", "data.split=9,1"],
            "data.source=t.jsonl, which is texts: expected null, and data.validation_fraction, dat",
        ),
        (
            ["data.mixture.x.source=t.jsonl", "data.mixture.y.source=a", "data.split=9,1"],
            "data.split=9,1 has no effect with data.mixture.x.source=t.jsonl, which is texts",
        ),
        (
            ["data.mixture..source=a"],
            "data.mixture: a source has an empty name: expected data.mixture.NAME",
        ),
        (
            ["data.source=stdlib", "data.text_field=code"],
            "data.text_field=code has no effect with data.source=stdlib, which is Python's stand",
        ),
        (
            [
                "data.mixture.x.source=a",
                "data.mixture.y.source=t.jsonl",
                "data.mixture.x.subset=en",
            ],
            "data.mixture.x.subset=en has no effect with data.mixture.x.source=a, which is a tok",
        ),
        (
            ["data.mixture.x.source=a", "data.subset=x"],
            "data.subset=x has no effect with data.mixture: expected null, and data.mixture.NAME.s",
        ),
        (
            ["data.mixture.x.source=a", "data.sample_format=megatron", "data.temperature=2"],
            "data.temperature=2.0 has no effect with data.sample_format=megatron, wh",
        ),
        (
            ["data.source=a", "data.split=0,0"],
            "data.split=0,0: the sum of the weights is 0: expected one above 0",
        ),
        (
            ["data.source=a", "data.split=1.2.3,1"],
            "data.split=1.2.3,1: expected one to three weights",
        ),
        (
            [f"data.mixture.s{i}.source=a" for i in range(256)],
            "data.mixture has 256 sources: expected 255 at most",
        ),
    ],
)
def test_keys_that_do_not_go_together(given: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(*given)
    assert words in str(caught.value)


def test_indices_of_a_token_file_are_kept_in_the_cache() -> None:
    for samples in ("packed", "megatron"):
        made("data.source=a", f"data.sample_format={samples}", f"data.cache={samples}")
        assert list(Path(samples).iterdir())
    made("data.source=a", "data.cache=x")  # taken as well, where there is nothing to keep
    assert not Path("x").exists()


@pytest.mark.parametrize("limit", ["tokens=7", "epochs=0.01"])
def test_less_than_a_sample_of_a_source(limit: str) -> None:
    with pytest.raises(DataError, match=r"data.mixture.b: tokens and epochs leave less than one"):
        mixed(f"data.mixture.b.{limit}")


@pytest.mark.parametrize("samples", ["megatron", "packed"])
def test_the_sources_of_a_run_share_the_room_for_arrays_that_are_held(
    samples: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arrays() -> list[StoredArray]:
        found = []
        for source in mixed(f"data.sample_format={samples}").sources:
            if isinstance(source.dataset, PackedDataset):
                found += source.dataset.packing
            else:
                assert isinstance(source.dataset, IndexedDataset)
                found += [source.dataset.file.offsets, *vars(source.dataset.indices).values()]
        return found

    assert all(array.is_in_memory for array in arrays())
    room = sum(array.nbytes for array in arrays()) - 1
    monkeypatch.setattr(build, "MemoryBudget", partial(MemoryBudget, together=room))
    *first, last = arrays()
    assert all(array.is_in_memory for array in first)
    assert not last.is_in_memory
