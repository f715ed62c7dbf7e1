import pytest

from serve.units import format_bytes


@pytest.mark.parametrize(
    ("count", "text"), [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")]
)
def test_bytes_are_readable(count: int | None, text: str) -> None:
    assert format_bytes(count) == text
