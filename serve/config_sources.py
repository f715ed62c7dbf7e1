"""`ServeConfig` from the command line, `VARVE_*` variables and a YAML file, in this order of precedence."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from serve.config import ServeConfig
from serve.errors import ConfigError

ENVIRONMENT_PREFIX = "VARVE_"
CONFIG_VARIABLE = "VARVE_CONFIG"


@dataclass(frozen=True)
class Setting:
    """A value, and what its user calls it: `--port`, `VARVE_PORT`, or `port in FILE`."""

    value: Any
    origin: str


def load_serve_config(flags: Mapping[str, str], environment: Mapping[str, str], file: Path | None) -> ServeConfig:
    """Merge the sources. flags: by field name. Raises ConfigError with one line."""
    file = file or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    settings: dict[str, Setting] = {}
    if file is not None:
        settings |= read_yaml(file)
    settings |= read_environment(environment)
    settings |= {name: Setting(value, flag_name(name)) for name, value in flags.items()}
    try:
        return ServeConfig.model_validate({name: setting.value for name, setting in settings.items()})
    except ValidationError as error:
        raise ConfigError(_first_problem(error, settings)) from error


def flag_name(field: str) -> str:
    """What the command line calls a field."""
    return "MODEL" if field == "model" else f"--{field}"


def read_environment(environment: Mapping[str, str]) -> dict[str, Setting]:
    """Fields that `VARVE_<FIELD>` variables set; other variables with the prefix mean nothing here."""
    settings = {}
    for name in ServeConfig.model_fields:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if variable in environment:
            settings[name] = Setting(environment[variable], variable)
    return settings


def read_yaml(file: Path) -> dict[str, Setting]:
    """Fields that a YAML mapping sets; keys in snake_case or kebab-case. Raises ConfigError."""
    import yaml  # only needed with --config

    try:
        content = yaml.safe_load(file.expanduser().read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must map flags to values, it holds a {type(content).__name__}")
    settings = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in ServeConfig.model_fields:
            raise ConfigError(f"unknown key {key!r} in {file}{did_you_mean(name, ServeConfig.model_fields)}")
        settings[name] = Setting(value, f"{key} in {file}")
    return settings


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing when no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _first_problem(error: ValidationError, settings: Mapping[str, Setting]) -> str:
    problem = error.errors()[0]
    field = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] == "missing":
        return f"{flag_name(field)} is missing"
    origin = settings[field].origin if field in settings else flag_name(field)
    text = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{origin}: {text}, got {str(problem['input'])!r}"
