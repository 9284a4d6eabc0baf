"""Tokenization of a whole corpus into one token file, whose name the user chooses."""

import hashlib
import json
import shutil
from pathlib import Path

from megapipe.config.data import DataConfig
from megapipe.config.section import Section
from megapipe.data.corpus import identity
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.prepare.build_once import build_once
from megapipe.data.prepare.parts_folder import CorpusShardFolder
from megapipe.data.prepare.remote_cache import check_contents
from megapipe.data.prepare.sizes import CorpusSizes, sizes_of
from megapipe.data.tokenizer import Tokenizer
from megapipe.data.tokens import TokenWriter
from megapipe.data.tokens.atomic_files import refuse_existing, rename_noreplace
from megapipe.data.tokens.format import bin_of, idx_of, token_type
from megapipe.data.tokens.join import join
from megapipe.errors import DataError


class TokenFileMeta(Section):
    """Description of a token file that contains a whole corpus."""

    mark: str
    """Digest that identifies the corpus and the tokenizer."""
    sizes: CorpusSizes
    """Sizes of the corpus."""
    entropy: float
    """Unigram entropy, in nats per token."""
    rows: RowCount
    """Counts of the rows of JSON and tables, and of rows without text."""


def prepare_file(
    config: DataConfig, tokenizer: Tokenizer, prefix: Path, *, progress: bool = True
) -> TokenFileMeta:
    """Write `prefix`.bin and `prefix`.idx with all documents of a corpus, in the corpus's order.

    The files are built in a neighbouring folder, by one process at a time, and then renamed. After
    an interruption, even between the two renames, the same call continues.

    Raises:
        DataError: a file with the prefix exists, the corpus cannot be read or is empty, or the
            files cannot be written.
    """
    mark = _mark(config, tokenizer)
    parts = CorpusShardFolder(prefix.with_name(f".{prefix.name}.{mark}.parts"), config, tokenizer)
    folder = prefix.with_name(f".{prefix.name}.made")
    vocab_size = tokenizer.vocab_size

    def fill(new: Path) -> None:
        refuse_existing(prefix)  # another process may have written it while this one waited
        check_contents(config.source, progress=progress)
        whole = parts.fill(progress=progress)
        with TokenWriter(new / "whole", token_type(vocab_size), vocab_size) as writer:
            join(parts.prefixes(whole), writer)
        if _mark(config, tokenizer) != mark:
            raise parts.has_changed()
        sizes = sizes_of(new / "whole", whole.text_bytes)
        made = TokenFileMeta(mark=mark, sizes=sizes, entropy=whole.entropy, rows=whole.rows)
        (new / "made.json").write_text(made.model_dump_json())

    try:
        if not folder.exists():
            refuse_existing(prefix)
            build_once(folder, fill)
        made = TokenFileMeta.model_validate_json((folder / "made.json").read_bytes())
        for name in (bin_of, idx_of):
            rename_noreplace(name(folder / "whole"), name(prefix))
        shutil.rmtree(folder)
    except OSError as error:
        raise DataError(f"{error.filename or prefix}: {error.strerror or error}") from error
    if made.mark != mark:  # `folder` was from an interrupted call for another corpus
        refuse_existing(prefix)
    parts.remove()
    return made


def _mark(config: DataConfig, tokenizer: Tokenizer) -> str:
    what = json.dumps([identity(config), tokenizer.digest])
    return hashlib.sha256(what.encode()).hexdigest()[:16]
