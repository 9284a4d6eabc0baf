"""Tokenizes a corpus into one token file that the user keeps."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from megapipe.config import DataConfig
from megapipe.data.corpus import identity
from megapipe.data.prepare.once import make_once
from megapipe.data.prepare.parts_folder import PartsFolder, Whole
from megapipe.data.prepare.sizes import Sizes, sizes_of
from megapipe.data.tokenizer import Tokenizer
from megapipe.data.tokens import TokenWriter
from megapipe.data.tokens.format import bin_of, idx_of, token_type
from megapipe.data.tokens.fresh import refuse_existing
from megapipe.data.tokens.join import join
from megapipe.errors import DataError


class Made(NamedTuple):
    """A token file of a whole corpus."""

    sizes: Sizes
    entropy: float
    """Unigram entropy, in nats per token."""


def prepare_file(
    config: DataConfig, tokenizer: Tokenizer, prefix: Path, *, progress: bool = True
) -> Made:
    """Write `prefix`.bin and .idx with all documents of a corpus, in its order.

    Work that was cut short is gone on with when the same is asked for again.

    Raises:
        DataError: a file of that name exists, the corpus cannot be read or is empty, or the files
            cannot be written.
    """
    refuse_existing(prefix)
    what = json.dumps([identity(config), tokenizer.digest])
    mark = hashlib.sha256(what.encode()).hexdigest()[:16]
    parts = PartsFolder(prefix.with_name(f".{prefix.name}.{mark}.parts"), config, tokenizer)
    made = prefix.with_name(f".{prefix.name}.{mark}")
    vocab_size = tokenizer.vocab_size

    whole: Whole | None = None

    def fill(folder: Path) -> None:
        nonlocal whole
        refuse_existing(prefix)  # another process may have made it while this one waited
        whole = parts.fill(progress=progress)
        with TokenWriter(folder / "whole", token_type(vocab_size), vocab_size) as writer:
            join(parts.prefixes(whole), writer)

    try:
        make_once(made, fill)
        bin_of(made / "whole").rename(bin_of(prefix))
        idx_of(made / "whole").rename(idx_of(prefix))
        made.rmdir()
    except OSError as error:
        raise DataError(f"{error.filename or prefix}: {error.strerror or error}") from error
    parts.remove()
    assert whole is not None
    return Made(sizes_of(prefix, whole.text_bytes), whole.entropy)
