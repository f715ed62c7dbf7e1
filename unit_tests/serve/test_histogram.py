from serve.histogram import Histogram


def test_a_value_on_a_bound_counts_below_it_and_the_last_bucket_has_no_bound():
    histogram = Histogram(bounds=(1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 99.0):
        histogram.observe(value)
    assert histogram.as_data() == {"bounds": [1.0, 2.0], "counts": [2, 2, 1], "sum": 104.0}
