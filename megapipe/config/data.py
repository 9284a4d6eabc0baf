"""The section `data` of the configuration: what a run is trained and validated on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from megapipe.config.section import ExpectedText, Needs, OnResume, Section, UserPath, needs

ONLY = ""
"""Name of the single source ``data.source`` in code: the user gives it no name."""


def source_key(name: str) -> str:
    """Return the dotted key of a training source, given its name."""
    return "data.source" if name == ONLY else f"data.mixture.{name}.source"


def _rising(pairs: list[list[float]]) -> list[list[float]]:
    steps = [step for step, _ in pairs]
    whole = all(step == int(step) and step < 2**53 for step in steps)
    if not steps or steps[0] != 0 or any(a >= b for a, b in itertools.pairwise(steps)) or not whole:
        raise ValueError("steps that rise from 0")
    return pairs


_Pair = Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=2, max_length=2)]
Weight = Annotated[float, Field(gt=0)] | Annotated[list[_Pair], AfterValidator(_rising)]
"""Constant weight, or pairs of a step (the first is 0) and the weight from that step on."""


class MixtureSource(Section):
    """One source of a mixture, with its weight and limits."""

    source: str
    """The source, in the forms of `data.source`."""
    weight: Annotated[
        Weight | None,
        ExpectedText(
            "a number > 0, or pairs of a step and the weight from it on: [[0, 3], [800, 1]]"
        ),
    ] = None
    """Share of the samples, in proportion to the weights of other sources; or pairs of a step and
    the weight from that step on, [[0, 3], [800, 1]]. Set it for all sources or for none. Default:
    the source's number of tokens, times `epochs`, but at most `tokens`."""
    tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens to take from this source; after that, the other sources continue in
    proportion to their weights."""
    epochs: float | None = Field(None, gt=0)
    """Maximum number of passes over this source; after that, the other sources continue in
    proportion to their weights."""
    subset: str | None = None
    """Configuration name of a Hugging Face data set, like `data.subset`."""
    dataset_split: str | None = None
    """Split of a Hugging Face data set, like `data.dataset_split`."""
    text_field: str | None = None
    """Field that holds the text; default: `data.text_field`."""


EXAMPLES = needs("data.sample_format", "supervised")
FILLS = needs("data.fim_rate", above=0)
MASKED = Needs("data.document_mask=true", lambda config: config.data.masks_documents)


class DataConfig(Section):
    """The corpus of a run and its tokenizer."""

    source: Annotated[str, OnResume.CORPUS] = "stdlib"
    """Corpus: `stdlib` (source text of the running Python's standard library, nothing to fetch), a
    file, a folder of files, a pattern such as `texts/**/*.jsonl.zst`, a folder saved by `datasets`,
    the name of a data set on the Hugging Face hub, or a Megatron-LM token file (PREFIX of
    PREFIX.bin and PREFIX.idx; its last documents are held out). Or your own function as
    `module:name` that returns a data set of token ids (docs/extending.md). Files are .jsonl, .json,
    .parquet or text; all except parquet may be compressed (.gz, .xz, .zst). A path may be a URL
    that fsspec opens (`s3://bucket/texts`): it is copied into `cache`, and its part after a `?` is
    never written to logs or files."""
    mixture: Annotated[
        dict[str, MixtureSource],
        ExpectedText("sources by names of your own, as in data.mixture.web.source=texts"),
    ] = Field(default_factory=dict)
    """Sources of a mixture, instead of `source`: data.mixture.NAME.source, and for each source
    `weight`, `tokens`, `epochs`, `subset`, `dataset_split`, `text_field` (docs/data.md). The source
    of a sample depends only on the sample's number. Each step's loss and tokens are logged per
    source, and the held-out part of each source is validated separately."""
    temperature: Annotated[float, needs("data.mixture")] = Field(1.0, gt=0)
    """Temperature of a mixture's weights, which get the exponent 1 / temperature: above 1, small
    sources are taken more often."""
    subset: Annotated[str | None, OnResume.CORPUS] = None
    """Configuration name of a data set on the hub, or of a folder that is read like one. A `source`
    on the command line discards `subset` and `dataset_split` of a configuration file."""
    dataset_split: Annotated[str | None, OnResume.CORPUS] = None
    """Split of a data set on the hub or saved by `datasets`; default: train. If it is set, any
    folder is read like a hub data set, with its splits. A file has none."""
    text_field: Annotated[str, OnResume.CORPUS] = "text"
    """Field that holds the text in JSONL, parquet and hub data sets."""
    tokenizer: Annotated[str, OnResume.CORPUS] = "byte"
    """`byte` (256 bytes and an end-of-document mark), a local folder or tokenizer.json, the name of
    a tokenizer on the Hugging Face hub, or `tiktoken:NAME` if that package is installed."""
    validation_fraction: Annotated[float, OnResume.CORPUS] = Field(0.02, ge=0, lt=1)
    """Fraction of the documents held out for validation; 0: none. It cannot be combined with
    `split` or `validation`."""
    split: Annotated[
        str | None, ExpectedText('weights such as "969,30,1", or null'), OnResume.CORPUS
    ] = Field(None, pattern=r"^\s*[0-9.]+(\s*,\s*[0-9.]+){0,2}\s*$")
    """Weights of training, validation and test in a token file, as in "969,30,1": they divide its
    sequences in this order, rounded as in Megatron-LM; a weight above 0 must get at least one
    sequence. It replaces `validation_fraction`."""
    validation: Annotated[
        dict[str, str],
        ExpectedText("sources by names of your own, as in data.validation.wiki=texts"),
        OnResume.CORPUS,
    ] = Field(default_factory=dict)
    """Validation sources: data.validation.NAME=SOURCE. The loss is computed on each whole source
    separately. With this key, no part of `source` or `mixture` is held out."""
    test: Annotated[
        dict[str, str],
        ExpectedText("sources by names of your own, as in data.test.wiki=texts"),
        OnResume.HARMLESS,
    ] = Field(default_factory=dict)
    """Test sources, whose loss is computed once, when the run has ended: data.test.NAME=SOURCE."""
    cache: Annotated[UserPath, OnResume.HARMLESS] = "cache"
    """Folder for tokenized corpora."""
    tokenizer_workers: Annotated[int | None, OnResume.HARMLESS] = Field(None, ge=1)
    """Number of processes that tokenize; default: one per core. The result does not depend on
    it."""
    prefetch: Annotated[bool | None, OnResume.HARMLESS] = None
    """Read samples in a separate thread, one step before their use. Default: true, but false for a
    user-defined data set, whose code may rely on one thread."""
    sample_format: Annotated[
        Literal["stateless", "packed", "megatron", "supervised"], OnResume.ORDER
    ] = "stateless"
    """How a token file becomes samples. stateless: ranges of `train.sequence_length` tokens, in an
    order that depends only on `run.seed` and the number of the sample; nothing is stored. packed:
    whole documents, as many as fit best (Ding et al., 2404.10830). They are independent: attention
    and positions are as under `document_mask` and `reset_position_ids`, and no label is in another
    document. The rest of a sample is padding without labels. A document longer than a sample is cut
    into independent parts. Which document is in which sample is stored in `cache`. megatron: the
    samples of Megatron-LM in its order, also of a mixture, for the same seed and `train.steps`. Its
    document, sample and shuffle indices are stored in `cache`. supervised: examples, packed like
    documents. A record has `messages_field`, a conversation, or else `prompt_field` and
    `completion_field`. In the loss only the completion with its end mark counts, or the assistant's
    text. An example longer than a sample is dropped."""
    prompt_field: Annotated[str, OnResume.CORPUS, EXAMPLES] = "prompt"
    """With sample_format=supervised: field with the prompt, on which the loss is not computed."""
    completion_field: Annotated[str, OnResume.CORPUS, EXAMPLES] = "completion"
    """With sample_format=supervised: field with the completion that the model should write."""
    messages_field: Annotated[str, OnResume.CORPUS, EXAMPLES] = "messages"
    """With sample_format=supervised: field with a conversation, a list of [{role: user, content:
    ...}, {role: assistant, ...}]. The tokenizer's chat template turns it into text."""
    chat_template: Annotated[str | None, OnResume.CORPUS, EXAMPLES] = None
    """File of a chat template in Jinja, as for transformers; default: the tokenizer's."""
    loss_turns: Annotated[Literal["all", "last"], OnResume.CORPUS, EXAMPLES] = "all"
    """Turns of the assistant that count in a conversation's loss: all, or the last one."""
    fim_rate: Annotated[float, OnResume.ORDER] = Field(0.0, ge=0, le=1)
    """Fraction of the documents that are rearranged to prefix, suffix and middle, so that a model
    learns to fill in the middle (Bavarian et al., 2207.14255). The part of a document in a sample
    is cut at two random tokens, which depend on `run.seed` and the number of the sample. For sample
    formats stateless and packed; held-out documents are unchanged."""
    fim_spm_rate: Annotated[float, OnResume.ORDER, FILLS] = Field(0.5, ge=0, le=1)
    """Fraction of the rearranged documents whose order is suffix, prefix, middle."""
    fim_tokens: Annotated[
        list[str] | None,
        ExpectedText("three names: [<fim_prefix>, <fim_suffix>, <fim_middle>]"),
        Field(min_length=3, max_length=3),
        OnResume.ORDER,
        FILLS,
    ] = None
    """Tokens, by name, that come before prefix, suffix and middle: [<fim_prefix>, <fim_suffix>,
    <fim_middle>]. The tokenizer must have them."""
    eod_mask_loss: Annotated[bool, OnResume.REFUSED] = False
    """Whether labels that are the end-of-document mark (EOS token) are left out of the loss."""
    document_mask: Annotated[bool, OnResume.REFUSED] = False
    """Whether a token attends only to its own document, not to earlier ones of the same sample."""
    reset_position_ids: Annotated[bool, OnResume.REFUSED, MASKED] = False
    """Restart positions at 0 in each document, with `document_mask`; otherwise positions continue
    through the sample. It matters only for learned positions: attention with rotary positions or
    ALiBi depends on distances."""

    @property
    def sources(self) -> dict[str, DataConfig]:
        """Training sources by name. Each value is the section `data` as it would be if the source
        were the only one."""
        if not self.mixture:
            return {ONLY: self}
        return {name: self._of(source) for name, source in self.mixture.items()}

    @property
    def named(self) -> Iterator[tuple[str, str]]:
        """Yield (key, source) for all configured sources, even if the run does not use them."""
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
        """Whether a sample consists of documents that do not attend to each other."""
        return self.sample_format in ("packed", "supervised")

    @property
    def masks_documents(self) -> bool:
        """Whether a token attends only to tokens of its document."""
        return self.document_mask or self.packs

    @property
    def resets_positions(self) -> bool:
        """Whether positions restart at the beginning of each document."""
        return self.reset_position_ids or self.packs
