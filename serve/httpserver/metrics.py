"""Counters of the HTTP processes, and their sum.

Each process counts for itself in plain numbers and, once a second, leaves a snapshot in the run directory. Whichever
process is asked for /metrics adds the snapshots of the others to its own numbers; one that was restarted goes on from
its predecessor's snapshot, so that counters never fall.
"""

import logging
import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

logger = logging.getLogger(__name__)
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
Labels = tuple[str, ...]


class Snapshot(msgspec.Struct):
    """One process's numbers: counters and gauges by label values, histograms as bucket counts, sum."""

    counters: dict[str, list[tuple[list[str], float]]] = {}
    gauges: dict[str, float] = {}
    histograms: dict[str, tuple[list[int], float]] = {}


class Counter:
    """A number that only grows, for each combination of label values."""

    def __init__(self, help_text: str, labels: Labels = ()) -> None:
        self.help = help_text
        self.labels = labels
        self.values: dict[Labels, float] = {} if labels else {(): 0.0}

    def inc(self, amount: float = 1, *label_values: str) -> None:
        """Add to the number of these label values."""
        self.values[label_values] = self.values.get(label_values, 0.0) + amount


class Histogram:
    """Counts of observations by `SECONDS`."""

    def __init__(self, help_text: str) -> None:
        self.help = help_text
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds


class HttpMetrics:
    """All numbers of one HTTP process; the attribute names are those of the metrics, less prefix and unit."""

    def __init__(self) -> None:
        self.requests = Counter("HTTP requests answered", ("method", "route", "status"))
        self.prompt_tokens = Counter("Prompt tokens of requests that have run")
        self.cached_tokens = Counter("Prompt tokens not computed", ("tier",))
        self.generated_tokens = Counter("Tokens generated")
        self.aborted = Counter("Sequences aborted before their end")
        self.first_token = Histogram("From submission to the first token")
        self.next_token = Histogram("Between tokens of a sequence")
        self.request = Histogram("From a request's head to the end of its answer")
        self.gauges: dict[str, float] = {}

    def counters(self) -> dict[str, Counter]:
        """Counters by metric name."""
        return {
            "varve_http_requests": self.requests,
            "varve_http_prompt_tokens": self.prompt_tokens,
            "varve_http_cached_tokens": self.cached_tokens,
            "varve_http_generated_tokens": self.generated_tokens,
            "varve_http_aborted_sequences": self.aborted,
        }

    def histograms(self) -> dict[str, Histogram]:
        """Histograms by metric name."""
        return {
            "varve_http_first_token_seconds": self.first_token,
            "varve_http_next_token_seconds": self.next_token,
            "varve_http_request_seconds": self.request,
        }

    def snapshot(self) -> Snapshot:
        """The numbers as plain data."""
        return Snapshot(
            {
                name: [(list(labels), value) for labels, value in counter.values.items()]
                for name, counter in self.counters().items()
            },
            dict(self.gauges),
            {name: (list(histogram.counts), histogram.sum) for name, histogram in self.histograms().items()},
        )

    def add(self, snapshot: Snapshot) -> None:
        """Add another process's numbers."""
        for name, counter in self.counters().items():
            for labels, value in snapshot.counters.get(name, []):
                counter.inc(value, *labels)
        for name, histogram in self.histograms().items():
            counts, total = snapshot.histograms.get(name, ([], 0.0))
            if len(counts) == len(histogram.counts):
                histogram.counts = [ours + theirs for ours, theirs in zip(histogram.counts, counts, strict=True)]
                histogram.sum += total
        for name, gauge in snapshot.gauges.items():
            self.gauges[name] = self.gauges.get(name, 0.0) + gauge


class MetricsBoard:
    """The snapshots of all HTTP processes of a server, as files in its run directory."""

    def __init__(self, run_dir: Path, index: int, metrics: HttpMetrics) -> None:
        self._run_dir = run_dir
        self._own = run_dir / f"http-metrics-{index}.json"
        self._metrics = metrics
        before = _read_snapshot(self._own)
        if before is not None:
            metrics.add(Snapshot(before.counters, {}, before.histograms))

    def publish(self) -> None:
        """Leave this process's snapshot for the others. A full disk costs the others its numbers, nothing more."""
        temporary = self._own.with_suffix(".new")
        try:
            temporary.write_bytes(msgspec.json.encode(self._metrics.snapshot()))
            os.replace(temporary, self._own)
        except OSError as error:
            logger.debug("no metrics snapshot: %s", error)

    def total(self) -> HttpMetrics:
        """The sum over all processes, this one's numbers being the latest."""
        total = HttpMetrics()
        total.add(self._metrics.snapshot())
        for path in self._run_dir.glob("http-metrics-*.json"):
            snapshot = None if path == self._own else _read_snapshot(path)
            if snapshot is not None:
                total.add(snapshot)
        return total


def _read_snapshot(path: Path) -> Snapshot | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Snapshot)
    except (OSError, msgspec.DecodeError):
        return None


class _Collector:
    """Gives the prometheus library the numbers in its own form."""

    def __init__(self, total: HttpMetrics, parts: dict[str, Any], families: Iterable[Any]) -> None:
        self._total = total
        self._parts = parts
        self._families = list(families)

    def collect(self) -> Iterable[Any]:
        for name, counter in self._total.counters().items():
            family = CounterMetricFamily(name, counter.help, labels=counter.labels)
            for labels, value in counter.values.items():
                family.add_metric(labels, value)
            yield family
        for name, histogram in self._total.histograms().items():
            yield _histogram_family(name, histogram.help, SECONDS, histogram.counts, histogram.sum)
        for name, value in self._total.gauges.items():
            yield GaugeMetricFamily(name, _help_of(name), value)
        for name, value in self._parts.items():
            yield _family_of_part(name, value)
        yield from self._families


def _family_of_part(name: str, value: Any) -> Any:
    """A number or a histogram that another process reports; names in `num_` count since its start."""
    if name.endswith("_per_s"):
        name = f"{name}econd"
    elif name.endswith("_s"):
        name = f"{name}econds"
    elif name.endswith("_total"):  # which says of a counter that it is one
        name = f"{name.removesuffix('_total')}_capacity"
    if isinstance(value, dict):
        return _histogram_family(name, _help_of(name), value["bounds"], value["counts"], value["sum"])
    if "_num_" in name:
        return CounterMetricFamily(name.replace("_num_", "_"), _help_of(name), value)
    return GaugeMetricFamily(name, _help_of(name), value)


def _help_of(name: str) -> str:
    return f"{name.removeprefix('varve_').replace('_', ' ')}, as its owner reports it"


def _histogram_family(name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Any:
    buckets, running = [], 0
    for bound, count in zip([*(str(float(bound)) for bound in bounds), "+Inf"], counts, strict=True):
        running += count
        buckets.append((bound, float(running)))
    return HistogramMetricFamily(name, text, buckets, total)


def flatten_statistics(area: str, statistics: Any) -> dict[str, Any]:
    """Numbers and histograms of nested statistics by metric name; names in `varve_` stay as they are."""
    found: dict[str, Any] = {}
    prefix = area if area.startswith("varve_") else f"varve_{area}"
    name = "".join(letter if letter.isascii() and (letter.isalnum() or letter == "_") else "_" for letter in prefix)
    if isinstance(statistics, dict) and statistics.keys() == {"bounds", "counts", "sum"}:
        found[name] = statistics
    elif isinstance(statistics, dict):
        for key, value in statistics.items():
            below = str(key).removeprefix(f"{area}_")
            found.update(flatten_statistics(below if below.startswith("varve_") else f"{prefix}_{below}", value))
    elif isinstance(statistics, (bool, int, float)):
        found[name] = float(statistics)
    return found


def render(total: HttpMetrics, parts: dict[str, Any], families: Iterable[Any] = ()) -> bytes:
    """The text of /metrics; parts: what `flatten_statistics` gave of other processes; families: further ones."""
    registry = CollectorRegistry()
    registry.register(_Collector(total, parts, families))
    text: bytes = generate_latest(registry)
    return text
