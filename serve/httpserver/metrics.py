"""Counters of the HTTP processes, and their sum.

Each process counts for itself in plain numbers and, once a second, leaves a snapshot in the run directory. Whichever
process is asked for /metrics adds the snapshots of the others to its own numbers; one that was restarted goes on from
its predecessor's snapshot, so that counters never fall.
"""

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from serve.histogram import Histogram
from serve.httpserver import metric_families

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


class Times(Histogram):
    """Counts of seconds by `SECONDS`."""

    def __init__(self, help_text: str) -> None:
        super().__init__(SECONDS)
        self.help = help_text


class HttpMetrics:
    """All numbers of one HTTP process; the attribute names are those of the metrics, less prefix and unit."""

    def __init__(self) -> None:
        self.requests = Counter("HTTP requests answered", ("method", "route", "status"))
        self.prompt_tokens = Counter("Prompt tokens of requests that have run")
        self.cached_tokens = Counter("Prompt tokens not computed", ("tier",))
        self.generated_tokens = Counter("Tokens generated")
        self.aborted = Counter("Sequences aborted before their end")
        self.output_seconds = Counter("Time in which tokens became text for clients to take")
        self.prepare = Times("From a request's head to its submission: body, template, tokens, page names")
        self.first_token = Times("From submission to the first token")
        self.next_token = Times("Between tokens of a sequence")
        self.request = Times("From a request's head to the end of its answer")
        self.gauges: dict[str, float] = {}

    def counters(self) -> dict[str, Counter]:
        """Counters by metric name."""
        return {
            "varve_http_requests": self.requests,
            "varve_http_prompt_tokens": self.prompt_tokens,
            "varve_http_cached_tokens": self.cached_tokens,
            "varve_http_generated_tokens": self.generated_tokens,
            "varve_http_aborted_sequences": self.aborted,
            "varve_http_output_seconds": self.output_seconds,
        }

    def histograms(self) -> dict[str, Times]:
        """Histograms by metric name."""
        return {
            "varve_http_prepare_seconds": self.prepare,
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

    def __init__(self, total: HttpMetrics, families: Iterable[Any]) -> None:
        self._total = total
        self._families = list(families)

    def collect(self) -> Iterable[Any]:
        for name, counter in self._total.counters().items():
            yield metric_families.counter(name, counter.help, counter.labels, counter.values)
        for name, histogram in self._total.histograms().items():
            yield metric_families.histogram(name, histogram.help, (), {(): histogram.as_data()})
        for name, value in self._total.gauges.items():
            text = f"{name.removeprefix('varve_').replace('_', ' ')}, of all processes"
            yield metric_families.gauge(name, text, (), {(): value})
        yield from self._families


def render(total: HttpMetrics, families: Iterable[Any] = ()) -> bytes:
    """The text of /metrics; families: what other processes tell."""
    registry = CollectorRegistry()
    registry.register(_Collector(total, families))
    text: bytes = generate_latest(registry)
    return text
