import pytest

from serve.bench.arrivals import Arrival
from serve.bench.flags import BenchError, resolve_options
from serve.bench.options import ServeBenchOptions


def resolve(**values: object) -> ServeBenchOptions:
    return resolve_options(ServeBenchOptions, values)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"arrival": "fixed"}, "--arrival fixed needs --rate"),
        ({"arrival": "poisson"}, "--arrival poisson needs --rate"),
        ({"arrival": "closed_loop"}, "--arrival closed_loop needs --concurrency"),
        ({"workload": "trace"}, "--workload trace and --trace FILE go together"),
        ({"trace": "x.jsonl"}, "--workload trace and --trace FILE go together"),
        ({"arrival": "trace"}, "--arrival trace needs --workload trace"),
    ],
)
def test_options_that_need_each_other_say_so(values: dict[str, object], line: str) -> None:
    with pytest.raises(BenchError, match=line):
        resolve(**values)


@pytest.mark.parametrize("values", [{"workload": "multi_turn"}, {"endpoint": "chat"}])
def test_prompts_that_hold_answers_are_text(values: dict[str, object]) -> None:
    assert not resolve(**values).uses_token_ids
    with pytest.raises(BenchError, match="token_ids fits neither"):
        resolve(prompt_format="token_ids", **values)


def test_prompts_are_token_ids_unless_told_otherwise() -> None:
    assert resolve().uses_token_ids
    assert not resolve(prompt_format="text").uses_token_ids


def test_a_trace_brings_its_own_times() -> None:
    assert resolve().arrivals is Arrival.ALL_AT_ONCE
    assert resolve(workload="trace", trace="x").arrivals is Arrival.TRACE
    assert resolve(workload="trace", trace="x", arrival="all_at_once").arrivals is Arrival.ALL_AT_ONCE


def test_extra_body_is_a_json_object() -> None:
    assert resolve(extra_body='{"top_k": 1}').extra_body == {"top_k": 1}
    for bad in ("{", "[1]"):
        with pytest.raises(BenchError, match="--extra_body"):
            resolve(extra_body=bad)
