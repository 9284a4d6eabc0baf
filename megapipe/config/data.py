"""The section `data` of the configuration: what a run is trained and validated on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from megapipe.config.section import ExpectedText, Needs, OnResume, Section, UserPath, needs

ONLY = ""
"""The name of a single source, ``data.source``, which the user gives none."""


def source_key(name: str) -> str:
    """Return the key of a source that is trained on, by its name."""
    return "data.source" if name == ONLY else f"data.mixture.{name}.source"


def _rising(pairs: list[list[float]]) -> list[list[float]]:
    steps = [step for step, _ in pairs]
    whole = all(step == int(step) and step < 2**53 for step in steps)
    if not steps or steps[0] != 0 or any(a >= b for a, b in itertools.pairwise(steps)) or not whole:
        raise ValueError("steps that rise from 0")
    return pairs


_Pair = Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=2, max_length=2)]
Weight = Annotated[float, Field(gt=0)] | Annotated[list[_Pair], AfterValidator(_rising)]
"""A constant, or pairs of a step, the first 0, and the weight from it on."""


class MixtureSource(Section):
    """A source of a mixture."""

    source: str
    """As `data.source`."""
    weight: Annotated[
        Weight | None,
        ExpectedText(
            "a number > 0, or pairs of a step and the weight from it on: [[0, 3], [800, 1]]"
        ),
    ] = None
    """Its share of the samples, in proportion to the others'; or pairs of a step and the weight
    from that step on, [[0, 3], [800, 1]]. Default, for all or none: its tokens, each counted as
    often as `epochs` says, or those that `tokens` leaves."""
    tokens: int | None = Field(None, ge=1)
    """Most tokens that are taken from it; then the others go on in proportion."""
    epochs: float | None = Field(None, gt=0)
    """Most times that all of it is taken; then the others go on in proportion."""
    subset: str | None = None
    """As `data.subset`."""
    dataset_split: str | None = None
    """As `data.dataset_split`."""
    text_field: str | None = None
    """As `data.text_field`, which is its default."""


EXAMPLES = needs("data.samples", "supervised")
FILLS = needs("data.fim_rate", above=0)
MASKED = Needs("data.document_mask=true", lambda config: config.data.masks_documents)


class DataConfig(Section):
    """The corpus and its tokenizer."""

    source: Annotated[str, OnResume.CORPUS] = "stdlib"
    """`stdlib` (source text of the running Python's standard library, nothing to fetch), a file
    (.txt, .jsonl, .json, .parquet; anything else is read as text; all but parquet may be packed:
    .gz, .xz, .zst), a folder of such files, a pattern such as `texts/**/*.jsonl.zst`, a folder
    saved by `datasets`, the name of a data set on the Hugging Face hub, a token file of
    Megatron-LM's (PREFIX of PREFIX.bin and PREFIX.idx, whose last documents are held out), any of
    these but the hub's by a URL that fsspec opens (`s3://bucket/texts`: copied into `cache`; what
    follows a `?` is left out of all that is written), or a function of your own as `module:name`
    that returns a data set of token ids (docs/extending.md)."""
    mixture: Annotated[
        dict[str, MixtureSource],
        ExpectedText("sources by names of your own, as in data.mixture.web.source=texts"),
    ] = Field(default_factory=dict)
    """Sources that are mixed, in the place of `source`: data.mixture.NAME.source, and of each
    `weight`, `tokens`, `epochs`, `subset`, `dataset_split`, `text_field` (docs/data.md). The source
    of a sample is a function of its number alone. Each step's loss and tokens are logged for each
    source, and what each holds out is validated by itself."""
    temperature: Annotated[float, needs("data.mixture")] = Field(1.0, gt=0)
    """Weights of a mixture are raised to the power of 1 / temperature: above 1, small sources
    are taken more often."""
    subset: Annotated[str | None, OnResume.CORPUS] = None
    """Configuration name of a hub data set, or of a folder that is read as one; files have none. A
    `source` on the command line comes without this and `dataset_split` of a configuration file."""
    dataset_split: Annotated[str | None, OnResume.CORPUS] = None
    """Split of a data set on the hub or saved by `datasets`; default: train. Where it is given, any
    folder is read as `datasets` reads one of the hub, with its splits; a file has none."""
    text_field: Annotated[str, OnResume.CORPUS] = "text"
    """Field that holds the text in JSONL, parquet and hub data sets."""
    tokenizer: Annotated[str, OnResume.CORPUS] = "byte"
    """`byte` (256 bytes and an end-of-document mark), a local folder or tokenizer.json, the name of
    a tokenizer on the Hugging Face hub, or `tiktoken:NAME` where that package is installed."""
    validation_fraction: Annotated[float, OnResume.CORPUS] = Field(0.02, ge=0, lt=1)
    """Share of the documents held out for validation; 0: none. Not for `split` and `validation`."""
    split: Annotated[
        str | None, ExpectedText('weights such as "969,30,1", or null'), OnResume.CORPUS
    ] = Field(None, pattern=r"^\s*[0-9.]+(\s*,\s*[0-9.]+){0,2}\s*$")
    """Of token files: weights of what is trained on, validated on and tested on, as in "969,30,1":
    their sequences in this order, rounded as Megatron-LM does; a weight above 0 has to get one or
    more. In the place of `validation_fraction`."""
    validation: Annotated[
        dict[str, str],
        ExpectedText("sources by names of your own, as in data.validation.wiki=texts"),
        OnResume.CORPUS,
    ] = Field(default_factory=dict)
    """Sources that are validated on, each by itself and whole: data.validation.NAME=SOURCE. Nothing
    of `source` or `mixture` is held out then."""
    test: Annotated[
        dict[str, str],
        ExpectedText("sources by names of your own, as in data.test.wiki=texts"),
        OnResume.HARMLESS,
    ] = Field(default_factory=dict)
    """Sources whose loss is computed once, when the run has ended: data.test.NAME=SOURCE."""
    cache: Annotated[UserPath, OnResume.HARMLESS] = "cache"
    """Folder for tokenized corpora."""
    workers: Annotated[int | None, OnResume.HARMLESS] = Field(None, ge=1)
    """Processes that tokenize; default: as many as there are cores. The result does not depend on
    them."""
    prefetch: Annotated[bool | None, OnResume.HARMLESS] = None
    """Read samples in a thread of its own, a step ahead of their use. Default: true, but for a data
    set of your own, whose code may count on one thread, false."""
    samples: Annotated[Literal["stateless", "packed", "megatron", "supervised"], OnResume.ORDER] = (
        "stateless"
    )
    """How a token file becomes samples. stateless: windows of `train.sequence_length` tokens, in an
    order that is a function of `run.seed` and the number of the sample; nothing is stored.
    packed: whole documents, as many as fit best (Ding et al., 2404.10830), each by itself:
    attention and positions as under `document_mask` and `reset_positions`, no label in another
    document, and what is left of a sample is padding, which is no label either. A document longer
    than a sample is cut into pieces that know nothing of each other. Which document is where is
    kept in `cache`.
    megatron: Megatron-LM's document, sample and shuffle index, and its order of a mixture, for as
    many samples as `train.steps` take: the same samples in the same order for the same seed. The
    indices are kept in `cache`.
    supervised: examples, packed as documents are. Rows of texts have `messages_field`, a
    conversation, or else `prompt_field` and `completion_field`; the completion with its end mark,
    or what the assistant says, counts in the loss, and nothing else does. An example longer than a
    sample is left out."""
    prompt_field: Annotated[str, OnResume.CORPUS, EXAMPLES] = "prompt"
    """Of `samples=supervised`: field of the text that is given."""
    completion_field: Annotated[str, OnResume.CORPUS, EXAMPLES] = "completion"
    """Field of the text that is to be written."""
    messages_field: Annotated[str, OnResume.CORPUS, EXAMPLES] = "messages"
    """Field of a conversation, a list of [{role: user, content: ...}, {role: assistant, ...}]. It
    is written by the tokenizer's chat template."""
    chat_template: Annotated[str | None, OnResume.CORPUS, EXAMPLES] = None
    """File of a chat template in Jinja, as transformers renders it; default: the tokenizer's."""
    train_on: Annotated[Literal["all", "last"], OnResume.CORPUS, EXAMPLES] = "all"
    """Turns of the assistant that count in the loss of a conversation: all, or the last one."""
    fim_rate: Annotated[float, OnResume.ORDER] = Field(0.0, ge=0, le=1)
    """Share of the documents that are rearranged to prefix, suffix and middle, so that a model
    learns to fill in the middle (Bavarian et al., 2207.14255): of what a sample has of a document,
    cut at two of its tokens at random. It follows from `run.seed` and the number of the sample. For
    samples stateless and packed, of texts and token files that are trained on; what is held out
    stays as it is."""
    fim_spm_rate: Annotated[float, OnResume.ORDER, FILLS] = Field(0.5, ge=0, le=1)
    """Share of those that are in the order suffix, prefix, middle."""
    fim_tokens: Annotated[
        list[str] | None,
        ExpectedText("three names: [<fim_prefix>, <fim_suffix>, <fim_middle>]"),
        Field(min_length=3, max_length=3),
        OnResume.ORDER,
        FILLS,
    ] = None
    """Names of the tokens that come before prefix, suffix and middle: [<fim_prefix>, <fim_suffix>,
    <fim_middle>]. The tokenizer has to have them."""
    mask_document_ends: Annotated[bool, OnResume.REFUSED] = False
    """Leave the prediction of end-of-document marks out of the loss."""
    document_mask: Annotated[bool, OnResume.REFUSED] = False
    """Tokens attend to earlier tokens of their own document only, not to those of the documents
    before it in the same sample."""
    reset_positions: Annotated[bool, OnResume.REFUSED, MASKED] = False
    """Positions begin at 0 in each document, with `document_mask`; otherwise they count on through
    the sample. It matters to learned positions alone: attention with rotary positions or ALiBi goes
    by distances."""

    @property
    def sources(self) -> dict[str, DataConfig]:
        """The sources that are trained on, by name, each with the keys that it is read with."""
        if not self.mixture:
            return {ONLY: self}
        return {name: self._of(source) for name, source in self.mixture.items()}

    @property
    def named(self) -> Iterator[tuple[str, str]]:
        """Every source that there is, by its key, whether it is used or not."""
        yield "data.source", self.source
        yield from ((f"data.mixture.{name}.source", s.source) for name, s in self.mixture.items())
        yield from ((f"data.validation.{name}", source) for name, source in self.validation.items())
        yield from ((f"data.test.{name}", source) for name, source in self.test.items())

    def _of(self, source: MixtureSource) -> DataConfig:
        given = {"source": source.source, "subset": source.subset}
        given["dataset_split"] = source.dataset_split
        given["text_field"] = source.text_field or self.text_field
        return self.model_copy(update=given)

    @property
    def packs(self) -> bool:
        """Whether a sample is made of documents that know nothing of each other."""
        return self.samples in ("packed", "supervised")

    @property
    def masks_documents(self) -> bool:
        """Whether attention ends where documents do."""
        return self.document_mask or self.packs

    @property
    def resets_positions(self) -> bool:
        """Whether positions begin anew where documents do."""
        return self.reset_positions or self.packs
