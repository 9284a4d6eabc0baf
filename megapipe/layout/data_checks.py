"""Refuses keys of the section `data` that conflict or have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megapipe.config import unused_keys
from megapipe.config.data import DataConfig, source_key
from megapipe.config.unused_keys import refuse_unused
from megapipe.data import token_file_corpus, user_dataset
from megapipe.data.corpus.files import is_standard_library
from megapipe.data.mixture import weight_plan
from megapipe.data.row_keys import check_fields, no_rows, unread_keys
from megapipe.data.split import split_ranges
from megapipe.errors import ConfigError
from megapipe.text import together
from megapipe.util.user_code import is_source

MOST_SOURCES = 255
"""Maximum number of sources of a mixture: a source's number is stored as one byte."""


def check_data(data: DataConfig) -> None:
    """Raise :class:`ConfigError` for keys that conflict or have no effect. User-defined data sets
    are loaded."""
    _check_mixture(data)
    if data.split is not None and data.validation:
        raise ConfigError(
            f"data.split={data.split} and data.validation both define the validation data: "
            "expected one of them"
        )
    if data.split is not None:
        split_ranges(data.split, 0)
    _check_fraction(data)
    if data.sample_format == "megatron":
        _check_megatrons(data)
    _check_fim(data)
    check_fields(data)
    for key in ("mixture", "validation", "test"):
        if "" in getattr(data, key):
            raise ConfigError(f"data.{key}: a source has an empty name: expected data.{key}.NAME")
    sources = list(_sources(data))
    without_fields = all("text_field" in _unread(read)[1] for _, read in sources)
    for key, read in sources:
        _check_source(data, key, read, alone=len(sources) == 1, without_fields=without_fields)


def _check_fraction(data: DataConfig) -> None:
    """Refuse ``data.validation_fraction`` if another key defines the validation data."""
    for key, instead in (("validation", "no data.validation"), ("split", "data.split=null")):
        if getattr(data, key) and data.validation_fraction:
            keys, why = ["validation_fraction"], f"with data.{key}"
            refuse_unused("data", data, keys, why, f", or {instead}")


def _unread(read: DataConfig) -> tuple[str, Sequence[str]]:
    """Return a description of a source in words, and the names of the keys about texts that have no
    effect on such a source."""
    if is_source(read.source):
        return "a user data set", token_file_corpus.TEXT_KEYS
    if "://" in read.source:  # what it is will be known after the download
        return "remote", ()
    return unread_keys(read.source, read.dataset_split)


def _sources(data: DataConfig) -> Iterator[tuple[str, DataConfig]]:
    """Yield the key that names each source, and the section `data` as it applies to the source."""
    for name, read in data.sources.items():
        yield source_key(name), read
    whole = data.model_copy(update={"subset": None, "dataset_split": None})
    for split, named in (("validation", data.validation), ("test", data.test)):
        for name, source in named.items():
            yield f"data.{split}.{name}", whole.model_copy(update={"source": source})


def _check_mixture(data: DataConfig) -> None:
    mixture = data.mixture
    if not mixture:
        return
    if data.source != DataConfig.model_fields["source"].default:
        raise ConfigError(
            f"data.source={data.source} and data.mixture ({', '.join(mixture)}): expected one of "
            "them"
        )
    if keys := unused_keys.given(data, ["subset", "dataset_split"]):
        instead = together([f"data.mixture.NAME.{key}" for key in keys])
        refuse_unused("data", data, keys, "with data.mixture", f", and {instead}")
    if len(mixture) > MOST_SOURCES:
        raise ConfigError(
            f"data.mixture has {len(mixture)} sources: expected {MOST_SOURCES} at most"
        )
    weights = {name: source.weight for name, source in mixture.items()}
    without = [name for name, weight in weights.items() if weight is None]
    if without and len(without) < len(mixture):
        raise ConfigError(
            f"data.mixture: a weight is missing for {', '.join(without)}: expected one for all "
            "sources, or for none"
        )
    for step, some in weight_plan([weight for weight in weights.values() if weight is not None]):
        if not any(some):
            raise ConfigError(
                f"data.mixture: from step {step} on all weights are 0: expected one above 0"
            )


def _check_megatrons(data: DataConfig) -> None:
    """Refuse keys of a mixture that Megatron-LM's blends do not support."""
    if data.mixture and all(s.weight is None for s in data.mixture.values()):
        why = "with data.sample_format=megatron, which takes sources without weights by their sizes"
        refuse_unused("data", data, ["temperature"], why, ", or data.mixture.NAME.weight")
    limits = [f"mixture.{name}.{key}" for name in data.mixture for key in ("tokens", "epochs")]
    why = "with data.sample_format=megatron, whose blends have only weights"
    refuse_unused("data", data, limits, why, "")
    for name, source in data.mixture.items():
        if isinstance(source.weight, list):
            raise ConfigError(
                f"data.mixture.{name}.weight={source.weight}: expected one number: Megatron-LM's "
                "blends do not change"
            )


def _check_fim(data: DataConfig) -> None:
    if not data.fim_rate:
        return
    if data.sample_format not in ("stateless", "packed"):
        raise ConfigError(
            f"data.fim_rate={data.fim_rate}: expected data.sample_format=stateless or packed, not "
            f"{data.sample_format}, or data.fim_rate=0"
        )
    if data.fim_tokens is None or len(set(data.fim_tokens)) < 3:
        raise ConfigError(
            f"data.fim_rate={data.fim_rate} needs data.fim_tokens: expected the names of three "
            "tokens, as in [<fim_prefix>, <fim_suffix>, <fim_middle>]"
        )


def _check_source(
    data: DataConfig, key: str, read: DataConfig, *, alone: bool, without_fields: bool
) -> None:
    """Refuse keys that have no effect on this kind of source.

    Unless the source is the only one (`alone`), keys that another source can use are accepted.
    `text_field` is refused only if no source has fields (`without_fields`).
    """
    source, (what, unread) = read.source, _unread(read)
    texts = [name for name in unread if name != "text_field" and key == "data.source"]
    texts += ["text_field"] if without_fields else []
    trained: Sequence[str] = ()
    if is_source(source):
        user_dataset.load(source, ConfigError)
        texts += [*user_dataset.OF_TEXTS] if alone else []
        trained = ("split", "sample_format")
    elif not token_file_corpus.is_token_file(source) and "://" not in source:
        trained = ("split",)
    instead = ", and data.validation_fraction, data.validation.NAME or data.test.NAME"
    if data.sample_format == "supervised" and (
        token_file_corpus.is_token_file(source) or is_standard_library(source)
    ):
        raise no_rows(key, source)
    why = f"with {key}={source}, which is {what}"
    refuse_unused("data", data, texts, why, "")
    name = key.removeprefix("data.mixture.").removesuffix(".source")
    if name in data.mixture:
        refuse_unused(f"data.mixture.{name}", data.mixture[name], unread, why, "")
    if key == "data.source" or key.startswith("data.mixture."):
        refuse_unused("data", data, trained, why, "" if is_source(source) else instead)
