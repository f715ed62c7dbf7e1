from prometheus_client import CollectorRegistry, generate_latest

from serve.httpserver import metric_families


class _One:
    def __init__(self, *families):
        self.families = families

    def collect(self):
        return self.families


def lines_of(*families):
    registry = CollectorRegistry()
    registry.register(_One(*families))
    return generate_latest(registry).decode().splitlines()


def test_counters_get_their_suffix_and_gauges_none():
    lines = lines_of(
        metric_families.counter("varve_x_pages", "Pages", ("group",), {("full",): 3, ("window",): 1}),
        metric_families.gauge("varve_x_bytes", "Bytes", (), {(): 7}),
    )
    assert "# TYPE varve_x_pages_total counter" in lines
    assert 'varve_x_pages_total{group="full"} 3.0' in lines
    assert 'varve_x_pages_total{group="window"} 1.0' in lines
    assert "varve_x_bytes 7.0" in lines


def test_histograms_are_cumulative_and_what_is_none_is_left_out():
    data = {"bounds": [0.5, 1.0], "counts": [1, 2, 3], "sum": 9.0}
    other = {"bounds": [2.0], "counts": [4, 0], "sum": 5.0}
    values = {("a",): data, ("b",): other, ("c",): {"bounds": [1.0], "counts": [1]}, ("d",): {}}
    lines = lines_of(metric_families.histogram("varve_x_seconds", "Times", ("tier",), values))
    assert 'varve_x_seconds_bucket{le="0.5",tier="a"} 1.0' in lines
    assert 'varve_x_seconds_bucket{le="1.0",tier="a"} 3.0' in lines
    assert 'varve_x_seconds_bucket{le="+Inf",tier="a"} 6.0' in lines
    assert 'varve_x_seconds_sum{tier="a"} 9.0' in lines
    assert 'varve_x_seconds_count{tier="b"} 4.0' in lines
    assert not [line for line in lines if 'tier="c"' in line or 'tier="d"' in line]


def test_numbers_of_a_dict_become_label_values():
    assert metric_families.by_label({"free": 3, "name": "x", "used": 0}) == {("free",): 3, ("used",): 0}
