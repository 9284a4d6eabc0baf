"""Files on object storage: ``data.source=s3://bucket/texts``, copied once into the cache.

What fsspec knows by its protocol can be named: ``s3``, ``gs``, ``https``, ... (some need a package,
which the error names). One process of those that share the cache copies; a copy is complete or is
not there, and one that was cut short goes on with the files that are complete. It is identified by
names, sizes and versions of the files, so that changed files are copied anew. Where the server
tells versions, the query of a URL is no part of that: by a new signature it is the same file.
Requests that fail are repeated (:mod:`megapipe.util.retries`); a file goes on where it was cut
short.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from megapipe.config.data import DataConfig
from megapipe.data.prepare.copies import AT_ONCE, FILES, MANIFEST, Copied, Manifest, check_sizes
from megapipe.data.prepare.copies import copied as copied_file
from megapipe.data.prepare.once import build_once
from megapipe.data.prepare.progress import Meter, meter
from megapipe.data.stored import crc_of, write_checksums
from megapipe.data.tokens.format import bin_of, idx_of
from megapipe.errors import ConfigError, DataError
from megapipe.util.beneath import refuse_links
from megapipe.util.urls import check_url, is_remote, without_query
from megapipe.words import REDACTED, one_line, without_secrets

if TYPE_CHECKING:
    from megapipe.data.remote_files import RemoteFiles

_VERSIONS = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "modified", "created")
"""Names that file systems have for the version of a file; the first one that is there is taken."""


class _Remote(NamedTuple):
    """Files of a server, and what is read of them."""

    files: RemoteFiles
    names: dict[str, dict[str, Any]]
    """Each file as its system describes it, by its place in the copy."""
    source: str
    """The source within the folder of copies: a name, a pattern, or nothing for all."""


def fetched(config: DataConfig, *, progress: bool = True) -> DataConfig:
    """`config` with a source on this machine: a URL's files are copied into the cache.

    Raises:
        DataError: they cannot be found or read, have changed on the way, or the copy is damaged.
    """
    if not is_remote(config.source):
        return config
    check_url("data.source", config.source)
    if config.source.endswith(REDACTED):
        raise ConfigError(
            f"data.source={config.source}: this is a URL as it was written down, without its query:"
            " expected the whole URL"
        )
    try:
        remote = _look(config.source)
        known = sorted((name, *_version(info)) for name, info in remote.names.items())
        told = all(version for *_, version in known)
        name = without_secrets(config.source) if told else config.source
        digest = hashlib.sha256(json.dumps([name, known]).encode()).hexdigest()[:32]
        folder = Path(config.cache, f"remote-{digest}")
        if not folder.exists():
            kept = folder.with_name(f".{folder.name}.parts")
            build_once(
                folder, lambda new: _copy(remote, config.source, kept, new, progress=progress)
            )
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"data.source={config.source}: {one_line(error)}") from error
    check_sizes(folder)
    inside = folder / FILES
    source = str(inside / remote.source) if remote.source else str(inside)
    return config.model_copy(update={"source": source})


def _look(source: str) -> _Remote:
    """The files that a URL names: one, those of a pattern or a folder, or a token file's two."""
    from fsspec.core import url_to_fs

    from megapipe.data.remote_files import RemoteFiles

    system, path = url_to_fs(source)
    files = RemoteFiles(system)
    if (plain := without_query(path)) != path:  # one file
        name = os.path.basename(plain) or "file"
        return _Remote(files, {name: files.info(path)}, name)
    if glob.has_magic(path):
        found = [name for name in files.glob(path) if files.has(name, "file")]
        root = os.path.commonpath([os.path.dirname(name) for name in found]) if found else ""
        return _Remote(files, _infos(files, found, root, source), "**/*")
    if files.has(path, "file"):
        found, root = [path], os.path.dirname(path)
        return _Remote(files, _infos(files, found, root, source), os.path.basename(path))
    halves = [f"{path}.bin", f"{path}.idx"]
    if all(files.has(half, "file") for half in halves):
        infos = _infos(files, halves, os.path.dirname(path), source)
        return _Remote(files, infos, os.path.basename(path))
    found = files.find(path) if files.has(path, "directory") else []
    return _Remote(files, _infos(files, found, path, source), "")


def _infos(
    files: RemoteFiles, names: list[str], root: str, source: str
) -> dict[str, dict[str, Any]]:
    if not names:
        raise DataError(f"data.source={source}: no such file or folder, and no file matches")
    found = {}
    for name in names:
        place = PurePosixPath(os.path.relpath(name, root or os.path.dirname(name)))
        if place.is_absolute() or ".." in place.parts:
            raise DataError(f"data.source={source}: {name} lies outside of it")
        found[str(place)] = files.info(name)
    return found


def _version(info: dict[str, Any]) -> tuple[int, str]:
    """Size and version of a file, as its system tells them."""
    version = next((str(info[key]) for key in _VERSIONS if info.get(key) is not None), "")
    return int(info["size"] or 0), version


def _copy(remote: _Remote, source: str, kept: Path, folder: Path, *, progress: bool) -> None:
    """Fill `folder`. Files that are complete are in `kept` until all are."""
    refuse_links(kept)
    total = sum(_version(info)[0] for info in remote.names.values())
    found = {}
    with meter(f"fetching {without_secrets(source)}", total, wanted=progress) as shown:
        for place, info in remote.names.items():
            if (kept / place).exists():
                found[place] = copied_file(kept / place)
                shown.advance(found[place].size, at_once=True)
            else:
                found[place] = _copy_file(remote.files, info, folder / "partial", shown)
                _move(folder / "partial", kept / place)
    for place in remote.names:
        _move(kept / place, folder / FILES / place)
    shutil.rmtree(kept, ignore_errors=True)
    prefix = folder / FILES / remote.source
    if bin_of(prefix).exists():
        for half in (bin_of(prefix), idx_of(prefix)):
            write_checksums(half)
            found[crc_of(half).name] = copied_file(crc_of(half))
    with open(folder / MANIFEST, "w") as file:
        file.write(
            Manifest(source=without_secrets(source), files=found).model_dump_json(indent=2) + "\n"
        )
        file.flush()
        os.fsync(file.fileno())


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)


def _copy_file(files: RemoteFiles, info: dict[str, Any], target: Path, shown: Meter) -> Copied:
    found, size = hashlib.sha256(), 0
    with open(target, "wb") as file:
        for block in files.blocks(info["name"], info.get("size"), AT_ONCE):
            found.update(block)
            file.write(block)
            size += len(block)
            shown.advance(len(block))
        file.flush()
        os.fsync(file.fileno())
    expected = info.get("size")
    if expected is not None and size != expected:  # more, as less is a failure
        raise DataError(f"{info['name']}: {size} bytes came, of {expected}: start again")
    return Copied(size=size, sha256=found.hexdigest())
