"""The manifest of a checkpoint: the content of `manifest.json`, checked before use.

The file is one line of canonical JSON, `{"body":BODY,"sha256":"HEX"}`, where HEX is the SHA-256 of
BODY's bytes. The digest is compared before BODY is parsed, so a damaged manifest is never
interpreted. The digest protects from accidents; it is not a signature.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from megapipe.checkpoint.regions import Region, first_uncovered
from megapipe.checkpoint.storage import StorageLocation, at
from megapipe.config.old_names import stored_with_new_names
from megapipe.errors import CheckpointError

MAX_BYTES = 1 << 28
"""Maximum bytes of a manifest: about two million pieces."""
MAX_DIMS = 6
VERSION = 2
"""Version of the format. Version 1 had a CRC-32 per piece and a SHA-256 per file."""

Dtype = Literal["fp32", "bf16", "fp64", "int64"]
Name = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)*$", max_length=256),
]
FileName = Annotated[str, StringConstraints(pattern=r"^[0-9]{5}-[0-9]{4}\.safetensors$")]
RunId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Key = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Xxh128 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(ge=0, lt=2**48)]
Positive = Annotated[int, Field(ge=1, lt=2**48)]


class Record(BaseModel):
    """Base of all records that are read from JSON: exact types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def with_new_names(self) -> Self:
        """Return the record with names of older versions replaced; the base class replaces none."""
        return self


OLD_COORDINATES = {
    "judged": "anomaly_state",
    "left_out": "skipped_samples",
    "owners": "expert_owners",
    "stream": "async_schedule",
}
"""New name of each of the manifest's `coordinates` that had another name in version 0.2."""


class StoredPiece(Record):
    """A region of an entry, stored in one shard file; `xxh128` is the 128-bit XXH3 of its bytes."""

    file: FileName
    offsets: Annotated[tuple[Count, ...], Field(max_length=MAX_DIMS)]
    sizes: Annotated[tuple[Positive, ...], Field(max_length=MAX_DIMS)]
    xxh128: Xxh128

    @property
    def region(self) -> Region:
        """Position of the piece in the entry."""
        return Region(self.offsets, self.sizes)


class Entry(Record):
    """A global tensor: type, shape and pieces (all pieces in a manifest, a rank's in a receipt)."""

    dtype: Dtype
    shape: Annotated[tuple[Count, ...], Field(max_length=MAX_DIMS)]
    pieces: tuple[StoredPiece, ...]

    @model_validator(mode="after")
    def _same_dims(self) -> "Entry":
        dims = len(self.shape)
        if any(len(p.offsets) != dims or len(p.sizes) != dims for p in self.pieces):
            raise ValueError(f"a piece does not have the entry's {dims} dimensions")
        return self


class FileRecord(Record):
    """The length of a shard file. No more is needed: pieces have checksums, and the header follows
    from the manifest."""

    bytes: Positive


class Receipt(Record):
    """Entries and files written by one rank; rank 0 merges all receipts into the manifest."""

    run_id: RunId
    step: Count
    rank: Count
    entries: dict[Name, Entry]
    files: dict[FileName, FileRecord]


class Manifest(Record):
    """The description of a checkpoint. It is valid only if the pieces tile every entry exactly."""

    format: Literal["megapipe-checkpoint"] = "megapipe-checkpoint"
    version: int = VERSION
    run_id: RunId
    step: Count
    layout: dict[Key, JsonValue]
    """Mesh sizes and other values of the layout that wrote the checkpoint; loading ignores them."""
    coordinates: dict[Key, JsonValue]
    """Progress of the run: consumed samples and the like."""
    config: dict[Key, JsonValue]
    """Configuration of the run, by dotted key."""
    digests: dict[Key, Sha256]
    """SHA-256 of the data that the run read: corpus and tokenizer."""
    entries: dict[Name, Entry]
    files: dict[FileName, FileRecord]

    @field_validator("version")
    @classmethod
    def _known(cls, version: int) -> int:
        if version != VERSION:
            raise ValueError(
                f"{version}, but this megapipe reads {VERSION}: another release wrote the file"
            )
        return version

    def with_new_names(self) -> Self:
        """Return the manifest with the present names of configuration keys and coordinates."""
        coordinates = {OLD_COORDINATES.get(k, k): value for k, value in self.coordinates.items()}
        config = dict(stored_with_new_names(self.config))
        return self.model_copy(update={"config": config, "coordinates": coordinates})

    @model_validator(mode="after")
    def _complete(self) -> "Manifest":
        for name, entry in self.entries.items():
            wrong = first_uncovered(entry.shape, (piece.region for piece in entry.pieces))
            if wrong is not None:
                element, count = wrong
                raise ValueError(
                    f"entry {name!r} of shape {list(entry.shape)}: element {list(element)} is in "
                    f"{count} pieces, not in one"
                )
        used = {piece.file for entry in self.entries.values() for piece in entry.pieces}
        if missing := used - self.files.keys():
            raise ValueError(f"file {min(missing)} is not listed")
        if unused := self.files.keys() - used:
            raise ValueError(f"file {min(unused)} is not used")
        return self


def build_manifest(
    *,
    run_id: str,
    step: int,
    layout: Mapping[str, JsonValue],
    coordinates: Mapping[str, JsonValue],
    config: Mapping[str, JsonValue],
    digests: Mapping[str, str],
    receipts: list[Receipt],
) -> Manifest:
    """Merge the ranks' receipts into a manifest. Raises CheckpointError if the receipts contradict
    each other, or do not make a complete checkpoint."""
    kinds: dict[str, tuple[Dtype, tuple[int, ...]]] = {}
    pieces: dict[str, list[StoredPiece]] = {}
    files: dict[str, FileRecord] = {}
    for receipt in receipts:
        if (receipt.run_id, receipt.step) != (run_id, step):
            raise CheckpointError(
                f"rank {receipt.rank} saves step {receipt.step} of run {receipt.run_id!r}, "
                f"rank 0 step {step} of {run_id!r}"
            )
        files |= receipt.files
        for name, entry in receipt.entries.items():
            kind = kinds.setdefault(name, (entry.dtype, entry.shape))
            if kind != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"entry {name!r} is {entry.dtype} {list(entry.shape)} on rank {receipt.rank}, "
                    f"{kind[0]} {list(kind[1])} on a lower rank"
                )
            pieces.setdefault(name, []).extend(entry.pieces)
    try:
        return Manifest(
            run_id=run_id,
            step=step,
            layout=dict(layout),
            coordinates=dict(coordinates),
            config=dict(config),
            digests=dict(digests),
            entries={
                name: Entry(dtype=dtype, shape=shape, pieces=tuple(pieces[name]))
                for name, (dtype, shape) in kinds.items()
            },
            files=files,
        )
    except ValidationError as error:
        raise CheckpointError(first_problem(error)) from None


def seal(record: Record) -> bytes:
    """Return the content of a file that stores the record: canonical JSON with its SHA-256.

    Raises CheckpointError for values that JSON lacks (NaN and infinity).
    """
    try:
        body = _canonical(record)
    except ValueError as error:
        raise CheckpointError(f"a value cannot be stored as JSON: {error}") from None
    return b'{"body":' + body + b',"sha256":"' + sha256(body).hexdigest().encode() + b'"}\n'


RecordT = TypeVar("RecordT", bound=Record)


def unseal(path: StorageLocation, kind: type[RecordT]) -> RecordT:
    """Read, check and parse a file that :func:`seal` made.

    Raises CheckpointError if the file is missing, too long, damaged, or not a record of `kind`.
    """
    data = at(path).read(MAX_BYTES)
    head, tail = b'{"body":', len(b',"sha256":""}\n') + 64
    body = data[len(head) : -tail]
    digest = sha256(body).hexdigest().encode()
    if data != head + body + b',"sha256":"' + digest + b'"}\n':
        raise CheckpointError(f"{path} is damaged: its own checksum does not match")
    try:
        record = kind.model_validate_json(body)
        canonical = _canonical(record)
    except ValidationError as error:
        raise CheckpointError(f"{path}: {first_problem(error)}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if canonical != body:
        raise CheckpointError(f"{path} is not canonical JSON (sorted keys, each once, no spaces)")
    return record.with_new_names()


def first_problem(error: ValidationError) -> str:
    """Format the first problem of a pydantic validation error on one line."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field_path = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    text = f"{field_path}: {message}" if field_path else message
    return " ".join(text.split())[:400]


def _canonical(record: Record) -> bytes:
    content = record.model_dump()
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
