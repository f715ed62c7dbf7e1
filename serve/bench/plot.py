"""A picture of one run: how latencies are distributed, and throughput over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serve.bench.metrics import RequestRecord


def save_plot(path: Path, title: str, passes: Mapping[str, Sequence[RequestRecord]]) -> None:
    """Write a PNG with one colour a pass. Raises OSError when the file cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (ttft, itl, throughput) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    figure.suptitle(title)
    for name, records in passes.items():
        good = [record for record in records if record.failure is None]
        _cumulative(ttft, [r.ttft for r in good if r.ttft is not None], name)
        _cumulative(itl, [gap for r in good for gap in r.itls], name)
        _over_time(throughput, good, name)
    for axes, heading, x_label, y_label in (
        (ttft, "time to first token", "ms", "share of requests"),
        (itl, "time between tokens", "ms", "share of gaps"),
        (throughput, "output", "s", "tok/s"),
    ):
        axes.set(title=heading, xlabel=x_label, ylabel=y_label)
        axes.grid(alpha=0.3)
    if len(passes) > 1:
        ttft.legend()
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def _cumulative(axes: Any, seconds: Sequence[float], name: str) -> None:
    values = np.sort(np.asarray(seconds)) * 1e3
    if len(values):
        axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post", label=name)
        axes.set_ylim(0, 1.02)


def throughput_bins(records: Sequence[RequestRecord], num_bins: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """(bin starts in seconds, events with output a second); empty when there are no events."""
    times = np.sort(np.asarray([t for r in records for t in r.event_times]))
    if not len(times):
        return np.empty(0), np.empty(0)
    begin = min(r.start for r in records)
    span = max(float(times[-1] - begin), 1e-3)
    counts, edges = np.histogram(times - begin, bins=num_bins, range=(0.0, span))
    return edges[:-1], counts / (span / num_bins)


def _over_time(axes: Any, records: Sequence[RequestRecord], name: str) -> None:
    starts, rates = throughput_bins(records)
    if len(starts):
        axes.step(starts, rates, where="post", label=name)
