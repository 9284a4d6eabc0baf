"""Files on object storage: ``data.source=s3://bucket/texts``, copied once into the cache.

Every protocol of fsspec can be used: ``s3``, ``gs``, ``https``, ... (if one needs a package, the
error names it). One of the processes that share the cache copies the files. The copy appears when
it is complete; after an interruption, complete files are not copied again. A copy is identified by
names, sizes and versions of the files, so changed files are copied again. If the server reports
versions, the query of a URL is not part of the identity, so a new signature does not cause a new
copy. Failed requests are retried (:mod:`megapipe.util.retries`); reading then continues in the
middle of a file.
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
from megapipe.data.prepare.build_once import build_once
from megapipe.data.prepare.progress import Meter, meter
from megapipe.data.prepare.remote_cache import (
    AT_ONCE,
    FILES,
    MANIFEST,
    Copied,
    Manifest,
    check_sizes,
)
from megapipe.data.prepare.remote_cache import copied as copied_file
from megapipe.data.stored import crc_of, write_checksums
from megapipe.data.tokens.format import bin_of, idx_of
from megapipe.errors import ConfigError, DataError
from megapipe.text import REDACTED, one_line, without_secrets
from megapipe.util.no_symlinks import refuse_links
from megapipe.util.urls import check_url, is_remote, without_query

if TYPE_CHECKING:
    from megapipe.data.remote_files import RemoteFiles

_VERSIONS = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "modified", "created")
"""Keys under which file systems report a file's version; the first key present is used."""


class _Remote(NamedTuple):
    """The files that a URL means on a server, and the path of the source in their local copy."""

    files: RemoteFiles
    names: dict[str, dict[str, Any]]
    """The file system's description of each file, by its path in the copy."""
    source: str
    """Path of the source in the copy: a name, a pattern, or "" for everything."""


def fetched(config: DataConfig, *, progress: bool = True) -> DataConfig:
    """Return `config` with a local source: if ``data.source`` is a URL, copy the files into the
    cache, and replace the URL by the path of the copy.

    Raises:
        DataError: the files are not found, unreadable or change meanwhile, or the copy is damaged.
    """
    if not is_remote(config.source):
        return config
    check_url("data.source", config.source)
    if config.source.endswith(REDACTED):
        raise ConfigError(
            f"data.source={config.source}: this URL was stored without its query: expected "
            "the whole URL"
        )
    try:
        remote = _look(config.source)
        known = sorted((name, *_version(info)) for name, info in remote.names.items())
        has_versions = all(version for *_, version in known)
        name = without_secrets(config.source) if has_versions else config.source
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
    """Find the files that a URL means: a single file, the two files of a token file, all files that
    match a pattern, or all files of a folder."""
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
        relative = PurePosixPath(os.path.relpath(name, root or os.path.dirname(name)))
        if relative.is_absolute() or ".." in relative.parts:
            raise DataError(f"data.source={source}: {name} is outside of it")
        found[str(relative)] = files.info(name)
    return found


def _version(info: dict[str, Any]) -> tuple[int, str]:
    """Return size and version of a file, as its file system reports them."""
    version = next((str(info[key]) for key in _VERSIONS if info.get(key) is not None), "")
    return int(info["size"] or 0), version


def _copy(remote: _Remote, source: str, kept: Path, folder: Path, *, progress: bool) -> None:
    """Copy all files of `remote` into `folder`, and write the manifest. Complete files are kept in
    the folder `kept` until all are complete, so that an interrupted copy can continue."""
    refuse_links(kept)
    total = sum(_version(info)[0] for info in remote.names.values())
    found = {}
    with meter(f"fetching {without_secrets(source)}", total, wanted=progress) as shown:
        for relative, info in remote.names.items():
            if (kept / relative).exists():
                found[relative] = copied_file(kept / relative)
                shown.advance(found[relative].size, done_before=True)
            else:
                found[relative] = _copy_file(remote.files, info, folder / "partial", shown)
                _move(folder / "partial", kept / relative)
    for relative in remote.names:
        _move(kept / relative, folder / FILES / relative)
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
    if expected is not None and size != expected:  # too many: too few is a failed read
        raise DataError(f"{info['name']}: {size} of {expected} bytes arrived: restart")
    return Copied(size=size, sha256=found.hexdigest())
