"""Reading JSON of checkpoint directories, with errors that name the file and the field."""

import json
import math
from pathlib import Path
from typing import Any

from models.errors import ModelError


class HfFields:
    """Fields of one JSON object, with errors that name the file and the field."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def get(self, *names: str) -> Any:
        """The first of `names` that is present and not null, else None."""
        for name in names:
            if self.data.get(name) is not None:
                return self.data[name]
        return None

    def number(self, *names: str, default: float | None = None, kind: type = int) -> Any:
        """A number of `kind`; ModelError if it is missing without a default or of another type."""
        value = self.get(*names)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where}: field '{names[0]}' is missing")
        allowed = (int, float) if kind is float else (int,)
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise ModelError(f"{self.where}: field '{names[0]}' must be a number, not {value!r}")
        if not math.isfinite(value):
            raise ModelError(f"{self.where}: field '{names[0]}' must be finite")
        return kind(value)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ModelError if it is missing or is something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent}: {path.name} is missing") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: is not a JSON object")
    return data
