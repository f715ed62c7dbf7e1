"""Names, kinds and labels of the router's metrics, as a scraper reads them."""

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from serve.httpserver.metrics import HttpMetrics, render
from serve.httpserver.router_metrics import router_families
from serve.router.admin import RouterAdmin
from serve.types import FinishReason, RequestStatus
from unit_tests.serve.router.router_fakes import Harness, prompt_of


def scrape(router: dict[str, Any]) -> dict[str, Any]:
    """Families by name."""
    text = render(HttpMetrics(), router_families(router)).decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families), "a name is given twice"
    return {family.name: family for family in families if family.name.startswith("varve_router_")}


def values_of(family: Any) -> dict[tuple[str, ...], float]:
    return {tuple(sample.labels[name] for name in sorted(sample.labels)): sample.value for sample in family.samples}


def statistics_of_two_answers() -> dict[str, Any]:
    harness = Harness()
    for _ in range(2):
        harness.submit(prompt_of(40), max_tokens=4)
        harness.run()
    return RouterAdmin(harness.router).statistics()


def test_what_counts_since_start_is_a_counter_and_what_is_now_a_gauge():
    statistics = statistics_of_two_answers()
    found = scrape(statistics)
    counters = {name for name, family in found.items() if family.type == "counter"}
    expected = {f"varve_router_{name.removeprefix('num_')}" for name in statistics if name.startswith("num_")}
    expected -= {f"varve_router_{name}" for name in ("requests", "waiting", "running", "plans_in_flight")}
    expected |= {f"varve_router_{name}" for name in ("cpu_seconds", "finished_requests", "evicted_pages")}
    assert counters == expected
    for name in counters:
        assert [sample.name for sample in found[name].samples][:1] == [f"{name}_total"]
    gauges = {name for name, family in found.items() if family.type == "gauge"}
    assert gauges == {
        f"varve_router_{name}"
        for name in (
            "up", "engine_up", "admitting", "waiting_requests", "running_requests", "requests", "plans_in_flight",
            "pages_held_by_jobs", "expected_output_ratio", "pages", "capacity_pages", "page_bytes",
        )
    }  # fmt: skip
    assert {name for name, family in found.items() if family.type == "histogram"} == {
        f"varve_router_{name}_seconds" for name in ("step", "queue", "first_token", "request")
    }


def test_groups_reasons_and_states_are_labels():
    found = scrape(statistics_of_two_answers())
    finished = values_of(found["varve_router_finished_requests"])
    assert finished == {(reason.name.lower(),): 2.0 * (reason is FinishReason.LENGTH) for reason in FinishReason}
    pages = values_of(found["varve_router_pages"])
    assert set(pages) == {("full", state) for state in ("free", "used", "cached")}
    assert pages["full", "cached"] == 2
    assert sum(pages.values()) == values_of(found["varve_router_capacity_pages"])["full",]
    assert values_of(found["varve_router_evicted_pages"]) == {("full",): 0}
    assert values_of(found["varve_router_requests"]) == {(status.value,): 0 for status in RequestStatus}


def test_a_router_that_is_away_leaves_one_metric():
    found = scrape({})
    assert {name: values_of(family) for name, family in found.items()} == {"varve_router_up": {(): 0}}


def test_statistics_of_another_shape_break_nothing():
    odd = {"pages": {"full": None}, "finished": 3, "num_steps": "many", "step_s": {"bounds": 1}, "by_status": []}
    assert values_of(scrape(odd)["varve_router_capacity_pages"]) == {("full",): 0}
