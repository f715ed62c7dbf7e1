"""The key-value section of a GGUF file as plain data, for the tokenizer."""

from pathlib import Path
from typing import Any

from models.errors import ModelError
from models.gguf_file import GgufArray, GgufFile


class GGUFError(Exception):
    """The file is not a GGUF file that can be read; the message is one line."""


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All key-value pairs of a GGUF file as plain Python data. Raises GGUFError."""
    try:
        file = GgufFile(path)
        return {
            name: file.array(name) if isinstance(value, GgufArray) else value for name, value in file.fields.items()
        }
    except ModelError as error:
        raise GGUFError(str(error)) from error
