"""The installed version; `pyproject.toml` is the one place that names it."""

from importlib import metadata


def installed_version() -> str:
    """`0.1.0`; `(not installed)` in a source tree without an installation."""
    try:
        return metadata.version("varve")
    except metadata.PackageNotFoundError:
        return "(not installed)"
