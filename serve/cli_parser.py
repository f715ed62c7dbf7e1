"""Command lines: flags made from the fields of `ServeConfig`, and errors of one line."""

import argparse
from collections.abc import Sequence
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from serve.config import ServeConfig
from serve.config_sources import did_you_mean, flag_name
from serve.errors import ConfigError

_METAVARS = {int: "N", float: "X", str: "TEXT"}


class LineParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ConfigError, and which never guesses an abbreviated flag."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(prog=program, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    @property
    def flags(self) -> dict[str, str]:
        """Every long flag by its snake_case form."""
        return {
            flag.replace("-", "_"): flag
            for action in self._actions
            for flag in action.option_strings
            if flag.startswith("--")
        }


def parse_line(parser: LineParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse; flags may be written with dashes or underscores. Raises ConfigError, SystemExit(0) after --help."""
    flags = parser.flags
    options, unknown = parser.parse_known_args([_normalise(word, flags) for word in words])
    if not unknown:
        return options
    wrong = next((word for word in unknown if word.startswith("-")), None)
    if wrong is None:
        raise ConfigError(f"unexpected argument {unknown[0]!r}")
    name = wrong.partition("=")[0]
    raise ConfigError(f"unknown flag {name}{did_you_mean(name, flags.values())}")


def _normalise(word: str, flags: dict[str, str]) -> str:
    """The flag in the spelling that the parser knows; anything else unchanged."""
    if not word.startswith("--"):
        return word
    name, separator, value = word.partition("=")
    return flags.get(name.replace("-", "_"), name) + separator + value


def add_config_flags(parser: LineParser) -> list[str]:
    """A flag for each field of ServeConfig; gives the fields' names. Values stay text: pydantic reads them."""
    parser.epilog = (
        "Every flag may also be set as VARVE_<FLAG> in the environment, or in a YAML file given with --config. "
        "The command line wins over the environment, the environment over the file."
    )
    for name, info in ServeConfig.model_fields.items():
        description = _describe(info)
        if name == "model":
            parser.add_argument(name, nargs="?", metavar="MODEL", help=description)
        elif info.annotation is bool:
            parser.add_argument(flag_name(name), dest=name, action="store_const", const="true", help=description)
            parser.add_argument(f"--no_{name}", dest=name, action="store_const", const="false", help=argparse.SUPPRESS)
        else:
            parser.add_argument(flag_name(name), dest=name, metavar=_metavar(info.annotation), help=description)
    return list(ServeConfig.model_fields)


def _describe(info: FieldInfo) -> str:
    text = (info.description or "").replace("%", "%%")
    if info.is_required() or info.default is None or info.default is False or info.default == "":
        return text
    return f"{text} (default: {info.default})"


def _metavar(annotation: Any) -> str:
    kinds = [annotation]
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(kinds[0]) is Literal:
        return "{" + ",".join(get_args(kinds[0])) + "}"
    return _METAVARS.get(kinds[0], "PATH")
