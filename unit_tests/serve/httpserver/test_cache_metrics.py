from prometheus_client.parser import text_string_to_metric_families

from serve.httpserver.cache_metrics import cache_families
from serve.httpserver.metrics import HttpMetrics, render
from serve.httpserver.router_metrics import router_families
from serve.multi_level_cache.cache_manager import CacheManager
from serve.multi_level_cache.control import statistics
from serve.router.admin import RouterAdmin
from unit_tests.serve.multi_level_cache.builders import Bench, request
from unit_tests.serve.multi_level_cache.test_disk_tier import Disk
from unit_tests.serve.router.router_fakes import Harness, prompt_of


def metrics_of(router, cache):
    """Value by (name, labels) of a whole page of metrics, as a scraper reads it."""
    text = render(HttpMetrics(), [*router_families(router), *cache_families(router, cache)]).decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families), "a name is given twice"
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


def test_statistics_of_the_real_parts_become_metrics(tmp_path):
    harness = Harness()
    for _ in range(2):
        harness.submit(prompt_of(40), max_tokens=4)
        harness.run()
    bench, disk = Bench(), Disk(tmp_path)
    assert isinstance(bench.manager, CacheManager)
    bench.store(request("r", "a", "b"))
    bench.host.stats.pages_withheld["no_hit"] = 3
    disk.store("a", "b")
    disk.load("a")
    cache = statistics(bench.manager) | {"lower_tier": disk.tier.statistics()}
    disk.tier.close(10)
    found = metrics_of(RouterAdmin(harness.router).statistics(), cache)
    assert found["varve_router_up",] == found["varve_cache_manager_up",] == 1
    assert found["varve_cache_hit_tokens_total", "device"] == 32
    assert found["varve_cache_hit_requests_total", "device"] == 1
    assert found["varve_cache_misses_total",] == 1
    assert found["varve_cache_tier_pages", "cached", "device"] == 2
    assert found["varve_cache_tier_pages", "host", "volatile"] == 2
    assert found["varve_cache_tier_pages", "disk", "stored"] == 2
    assert found["varve_cache_withheld_pages_total", "no_hit"] == 3
    assert found["varve_cache_moved_bytes_total", "disk", "store"] == 8192
    assert found["varve_cache_load_seconds_count", "disk"] == 1
    assert found["varve_cache_store_seconds_count", "disk"] == 2
    assert found["varve_cache_transfers_total", "disk", "done", "load"] == 1
    assert found["varve_cache_eviction_age_seconds_count", "host"] == 0
    assert found["varve_cache_estimated_prefill_tokens_per_second",] > 0
    assert found["varve_router_running_requests",] == 0
    assert found["varve_router_steps_total",] > 0
    assert not [name for name, *_ in found if "per_seconds" in name]


def test_a_part_that_is_away_costs_its_own_numbers_only():
    found = metrics_of({}, {})
    assert found["varve_router_up",] == found["varve_cache_manager_up",] == 0
    assert not [name for name, *_ in found if name.startswith("varve_cache_hit")]
    bench = Bench()
    assert metrics_of({}, statistics(bench.manager))["varve_cache_host_slots", "free"] == bench.host.pool.num_free


def test_statistics_of_another_shape_break_nothing():
    odd = {"tiers": 3, "pages": {"full": None}, "cached_tokens": [], "slots": {"total": 1}, "drops": {"x": "y"}}
    odd["lower_tier"] = {"load_times": {"bounds": [1.0], "counts": [1]}, "off_reason": 5}
    assert metrics_of(odd, odd)["varve_cache_host_slots", "total"] == 1
