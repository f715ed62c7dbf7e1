"""Command-line flags out of a pydantic model: one declaration gives the flag, its help, its check and its default."""

import argparse
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from serve.errors import UserError

Options = TypeVar("Options", bound=BaseModel)


class BenchError(UserError):
    """The benchmark cannot run: one line for the user."""

    exit_code = 2


def add_option_flags(parser: argparse.ArgumentParser, options: type[BaseModel]) -> None:
    """Add one `--flag VALUE` a field of `options`; values stay strings until `resolve_options`.

    A boolean may be given alone, which means true.
    """
    for name, field in _flags(options):
        extra: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
        default = "" if field.default in (None, {}, "") else f" (default: {_shown(field.default)})"
        text = f"{field.description}{default}".replace("%", "%%")
        parser.add_argument(f"--{name}", dest=name, default=None, metavar="X", help=text, **extra)


def given_values(args: argparse.Namespace, options: type[BaseModel]) -> dict[str, object]:
    """What the user gave on the command line, by field name."""
    return {name: value for name, _ in _flags(options) if (value := getattr(args, name, None)) is not None}


def resolve_options(options: type[Options], *layers: Mapping[str, object]) -> Options:
    """Merge `layers`, the strongest first, over the defaults and check them; BenchError names the first bad flag."""
    merged: dict[str, object] = {}
    for layer in reversed(layers):
        merged.update(layer)
    try:
        return options.model_validate(merged)
    except ValidationError as error:
        raise BenchError(_first_line(error)) from error


def _flags(options: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    """Fields under the name that the user sees, which is the alias of those that have one."""
    return [(field.alias or name, field) for name, field in options.model_fields.items()]


def _shown(default: object) -> object:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, list):
        return ",".join(str(_shown(each)) for each in default)
    return default.value if isinstance(default, Enum) else default


def _first_line(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message
    if first["type"] == "extra_forbidden":
        return f"unknown option {first['loc'][0]!r}"
    return f"--{first['loc'][0]} {first['input']}: {message[0].lower()}{message[1:]}"
