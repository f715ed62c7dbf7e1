"""Metric families out of plain data: values by label values."""

from collections.abc import Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from serve.cache_report import Data, number_of, numbers_of

Labels = tuple[str, ...]
Values = Mapping[Any, float]
"""By label values, a tuple in the order of the labels."""


def by_label(data: Data) -> dict[tuple[str], float]:
    """The numbers of a dict, each under its own name as the only label value."""
    return {(key,): value for key, value in numbers_of(data).items()}


def gauge(name: str, text: str, labels: Labels, values: Values) -> Any:
    """A family of gauges; name: with its unit."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, float(value))
    return family


def counter(name: str, text: str, labels: Labels, values: Values) -> Any:
    """A family of counters; name: with its unit, without `_total`, which is added."""
    family = CounterMetricFamily(name, text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, float(value))
    return family


def histogram(name: str, text: str, labels: Labels, values: Mapping[Any, Data]) -> Any:
    """A family of histograms; what is none is left out."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for label_values, data in values.items():
        bounds, counts = data.get("bounds"), data.get("counts")
        if not isinstance(bounds, list) or not isinstance(counts, list) or len(counts) != len(bounds) + 1:
            continue
        buckets, running = [], 0.0
        for bound, count in zip([*(str(float(bound)) for bound in bounds), "+Inf"], counts, strict=True):
            running += count
            buckets.append((bound, running))
        family.add_metric(label_values, buckets, number_of(data, "sum"))
    return family
