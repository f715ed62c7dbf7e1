"""Quantities as people read them."""

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: float | None) -> str:
    """`1.5 GiB`: in the largest binary unit that gives at least 1; a dash where nobody knows."""
    if count is None:
        return "-"
    unit = 0
    while abs(count) >= 1024 and unit < len(_BYTE_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {_BYTE_UNITS[unit]}"
