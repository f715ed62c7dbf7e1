from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve.config import ResolvedConfig, ServeConfig
from serve.errors import LaunchError
from serve.launcher.child_process import ChildSpec
from serve.launcher.engine_info import (
    EngineFacts,
    engine_up_info,
    fit_length_limit,
    merge_copy_speeds,
    merge_digests,
    merge_page_counts,
)
from serve.launcher.model_facts import GroupFacts
from serve.launcher.start_summary import format_summary, worker_phases
from serve.router.cost_model import CostPrior
from unit_tests.serve.fakes.varve_fakes.children import FakeChild

FULL = GroupFacts("full", "full", "all_pages", 16, 0, 100)
WINDOW = GroupFacts("window", "bounded", "trailing_pages", 16, 512, 100)


def workers(*infos: dict[str, Any]) -> Any:
    return [FakeChild(ChildSpec("worker", rank, 1, "module"), info=info) for rank, info in enumerate(infos)]


def config(limit: int | None, context: int) -> ResolvedConfig:
    return ResolvedConfig(
        serve=ServeConfig(model="m", max_req_total_len=limit),
        model_path=Path("m"),
        model_name="m",
        run_dir=Path("/tmp"),
        device="cpu",
        data_type="float32",
        threads_per_worker=1,
        max_req_total_len=context,
        batch_max_tokens=1,
        chunked_prefill_size=1,
        page_size=16,
        num_slots=1,
    )


def test_a_group_has_the_pages_that_every_rank_has() -> None:
    ranks = workers({"num_pages": {"full": 10, "window": 7}}, {"num_pages": {"full": 8, "window": 9}})
    assert merge_page_counts([FULL, WINDOW], ranks) == {"full": 8, "window": 7}


@pytest.mark.parametrize("info", [{}, {"num_pages": {"full": 0}}, {"num_pages": {"other": 3}}, {"num_pages": 3}])
def test_a_rank_without_pages_is_an_error(info: dict[str, Any]) -> None:
    with pytest.raises(LaunchError):
        merge_page_counts([FULL], workers({"num_pages": {"full": 5}}, info))


def test_digests_of_all_ranks_are_merged() -> None:
    ranks = workers({"block_digests": {0: "aa", 1: "bb"}}, {"block_digests": {"1": "bb", "2": "cc"}})
    assert merge_digests(ranks) == {0: b"\xaa", 1: b"\xbb", 2: b"\xcc"}


def test_ranks_that_read_other_weights_are_an_error() -> None:
    with pytest.raises(LaunchError, match=r"worker-1 read other weights than its peers \(block 0\)"):
        merge_digests(workers({"block_digests": {0: "aa"}}, {"block_digests": {0: "bb"}}))


@pytest.mark.parametrize(("pages", "expected"), [(1000, 4096), (100, 1600)])
def test_a_small_pool_lowers_the_default_limit(pages: int, expected: int) -> None:
    assert fit_length_limit(config(None, 4096), [FULL, WINDOW], {"full": pages, "window": 1}) == expected


def test_a_limit_that_was_asked_for_must_fit_the_pool() -> None:
    assert fit_length_limit(config(1600, 1600), [FULL], {"full": 100}) == 1600
    with pytest.raises(LaunchError, match="--max_req_total_len 1601 does not fit the device pool of 1600 tokens"):
        fit_length_limit(config(1601, 1601), [FULL], {"full": 100})


def test_phases_are_those_of_the_slowest_rank() -> None:
    ranks = workers({"phases": {"load": 1.0, "warm up": 3}}, {"phases": {"load": 2.0, "note": "text"}}, {})
    assert worker_phases(ranks) == {"load": 2.0, "warm up": 3.0}


def test_copies_are_as_fast_as_on_the_slowest_rank() -> None:
    ranks = workers({"copy_bytes_per_s": {"load": 3e9, "store": 1e9}}, {"copy_bytes_per_s": {"load": 2e9, "store": 4}})
    assert merge_copy_speeds(ranks) == {"load": 2e9, "store": 4}
    assert merge_copy_speeds(workers({}, {"copy_bytes_per_s": {}})) == {}


def test_the_router_believes_the_probe_until_it_has_measured() -> None:
    facts = EngineFacts(b"n", [FULL], {"full": 3}, 16, {"load": 2e9, "store": 1e9})
    model = SimpleNamespace(describe=lambda config: {"config": {}})
    info = engine_up_info(config(None, 16), model, facts, b"k")  # type: ignore[arg-type]
    assert CostPrior(**info["prior"]) == CostPrior(load_bytes_per_s=2e9)


def test_the_summary_counts_the_tiers() -> None:
    facts = EngineFacts(b"n", [FULL], {"full": 3}, 16, {"load": 2**30})
    text = format_summary(config(None, 16), facts, [], {"host": {"full": 5}, "disk": {"full": 9}}, {}, "url")
    assert "device 3 pages, 48 tokens, 300 B; host 5 pages, 80 tokens, 500 B; disk 9 pages, 144 tokens, 900 B" in text
    assert "copies   load 1.0 GiB/s" in text
    without = format_summary(config(None, 16), EngineFacts(b"n", [FULL], {"full": 3}, 16, {}), [], {}, {}, "url")
    assert "host 0 pages; disk 0 pages" in without
    assert "copies" not in without
