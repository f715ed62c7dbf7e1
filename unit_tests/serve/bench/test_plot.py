from pathlib import Path

import pytest

from serve.bench.metrics import RequestRecord
from serve.bench.plot import save_plot, throughput_bins


def record(times: list[float]) -> RequestRecord:
    return RequestRecord(0, 0, 0.0, 9.0, 1, len(times), len(times), ttft=1.0, itls=[0.1], event_times=times)


def test_throughput_is_events_a_second() -> None:
    starts, rates = throughput_bins([record([0.5, 1.5]), record([1.6, 4.0])], num_bins=4)
    assert starts.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert rates.tolist() == [1.0, 2.0, 0.0, 1.0]
    assert len(throughput_bins([])[0]) == 0


def test_a_png_is_written_even_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "p.png"
    failed = RequestRecord(0, 0, 0.0, 1.0, 0, 0, 3, failure="timeout")
    save_plot(path, "title", {"pass 1": [record([0.5, 1.5])], "pass 2": [failed]})
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_place_that_cannot_be_written_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        save_plot(tmp_path / "none" / "p.png", "title", {"pass 1": [record([0.5])]})
