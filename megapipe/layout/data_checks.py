"""Keys of `data` that do not go together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megapipe.data import given, own
from megapipe.data.corpus.files import is_standard_library
from megapipe.data.mixture import weight_plan
from megapipe.data.row_keys import check_fields, no_rows
from megapipe.data.split import split_ranges
from megapipe.data_config import DataConfig, source_key
from megapipe.errors import ConfigError
from megapipe.unused_keys import refuse_unused
from megapipe.user_code import is_source

MOST_SOURCES = 255
"""Of a mixture: a byte tells them apart."""


def check_data(data: DataConfig) -> None:
    """Raise :class:`ConfigError` for keys that contradict each other, or that nothing would read;
    user-defined data sets are loaded."""
    _check_mixture(data)
    if data.split is not None and data.validation:
        raise ConfigError(
            f"data.split={data.split} and data.validation: expected one of them, as each says what "
            "is validated on"
        )
    if data.split is not None:
        split_ranges(data.split, 0)
    if data.reset_positions and not data.masks_documents:
        raise ConfigError(
            "data.reset_positions=true is for documents that attention keeps apart: expected "
            "data.document_mask=true too, or false"
        )
    if data.samples == "megatron":
        _check_megatrons(data)
    _check_fim(data)
    check_fields(data)
    for key in ("mixture", "validation", "test"):
        if "" in getattr(data, key):
            raise ConfigError(f"data.{key}: a source has an empty name: expected data.{key}.NAME")
    sources = list(_sources(data))
    for key, source in sources:
        _check_source(data, key, source, alone=len(sources) == 1)


def _sources(data: DataConfig) -> Iterator[tuple[str, str]]:
    """Every source with the key that names it."""
    for name, config in data.sources.items():
        yield source_key(name), config.source
    for split, named in (("validation", data.validation), ("test", data.test)):
        for name, source in named.items():
            yield f"data.{split}.{name}", source


def _check_mixture(data: DataConfig) -> None:
    mixture = data.mixture
    if not mixture:
        refuse_unused("data", data, ["temperature"], "without data.mixture")
        return
    if data.source != DataConfig.model_fields["source"].default:
        raise ConfigError(
            f"data.source={data.source} and data.mixture ({', '.join(mixture)}): expected one of "
            "them"
        )
    for key in ("subset", "dataset_split"):
        refuse_unused("data", data, [key], "with data.mixture", f", and data.mixture.NAME.{key}")
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
    """Refuse what Megatron-LM's blends do not have."""
    if data.temperature != 1 and all(s.weight is None for s in data.mixture.values()):
        raise ConfigError(
            f"data.temperature={data.temperature} is for weights, and data.mixture has none: "
            "data.samples=megatron takes sources by their sizes then; expected 1, or weights"
        )
    for name, source in data.mixture.items():
        key = f"data.mixture.{name}"
        if source.tokens is not None or source.epochs is not None:
            raise ConfigError(
                f"{key}: tokens and epochs are for data.samples=stateless or packed: Megatron-LM's "
                "blends have weights alone"
            )
        if isinstance(source.weight, list):
            raise ConfigError(
                f"{key}.weight={source.weight}: expected one number: Megatron-LM's blends do not "
                "change"
            )


def _check_fim(data: DataConfig) -> None:
    if not data.fim_rate:
        refuse_unused("data", data, ["fim_tokens", "fim_spm_rate"], "without data.fim_rate above 0")
        return
    if data.samples not in ("stateless", "packed"):
        raise ConfigError(
            f"data.fim_rate={data.fim_rate}: expected data.samples=stateless or packed, not "
            f"{data.samples}, or data.fim_rate=0"
        )
    if data.fim_tokens is None or len(set(data.fim_tokens)) < 3:
        raise ConfigError(
            f"data.fim_rate={data.fim_rate} needs data.fim_tokens: expected the names of three "
            "tokens, as in [<fim_prefix>, <fim_suffix>, <fim_middle>]"
        )


def _check_source(data: DataConfig, key: str, source: str, *, alone: bool) -> None:
    """Refuse keys that have no effect on a source of its kind: those that another source may use,
    only if it is alone."""
    texts: Sequence[str] = ()
    trained: Sequence[str] = ()
    if is_source(source):
        own.load(source, ConfigError)
        what = "a data set of your own"
        texts, trained = (*own.CORPUS_KEYS, "fim_rate"), ("split", "samples")
    elif given.is_given(source):
        what, texts = "a token file", given.TEXT_KEYS
    elif is_standard_library(source):
        what, texts, trained = "Python's standard library", given.TEXT_KEYS, ("split",)
    elif "://" in source:  # what it is will be known when it is here
        return
    else:
        what, trained = "texts", ("split",)
    instead = ", and data.validation_fraction, data.validation.NAME or data.test.NAME"
    if data.samples == "supervised" and (given.is_given(source) or is_standard_library(source)):
        raise no_rows(key, source)
    why = f"with {key}={source}, which is {what}"
    if alone:
        refuse_unused("data", data, texts, why, "")
    name = key.removeprefix("data.mixture.").removesuffix(".source")
    if name in data.mixture and texts:
        refuse_unused(f"data.mixture.{name}", data.mixture[name], given.TEXT_KEYS, why, "")
    if key == "data.source" or key.startswith("data.mixture."):
        refuse_unused("data", data, trained, why, "" if is_source(source) else instead)
