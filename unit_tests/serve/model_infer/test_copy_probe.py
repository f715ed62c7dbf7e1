"""The probe gives speeds of whole pages, and leaves the pool as it was."""

import pytest
import torch

from serve.model_infer import copy_probe
from serve.model_infer.copy_probe import ProbeError, measure_copies
from serve.model_infer.page_mover import PageMover
from serve.model_infer.transfer import Outcome, Transfer
from serve.types import JobResult
from unit_tests.serve.model_infer.staging_bench import Bench, make_layout


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 1), (4, 1)])
def test_both_directions_are_measured(tp: int, rank: int):
    bench = Bench(make_layout(3))
    engine = bench.rank(tp=tp, rank=rank)
    before = engine.pool.clone()
    if engine.parts.groups["full"].stores.num_bytes == 0:
        before[:16] = 0  # of a head that another rank stores, nothing comes back
    speeds = measure_copies(engine.parts.groups, bench.arena.shape.slot_bytes)
    assert set(speeds) == {"load", "store"}
    assert all(speed > 1e5 for speed in speeds.values())
    assert torch.equal(engine.pool, before)
    bench.close()


def test_a_rank_whose_pages_do_not_come_back_does_not_start(monkeypatch: pytest.MonkeyPatch):
    def run(self: PageMover, transfer: Transfer) -> Outcome:
        return Outcome(JobResult.FAILED, "all wrong")

    monkeypatch.setattr(PageMover, "run", run)
    bench = Bench()
    with pytest.raises(ProbeError, match="all wrong"):
        copy_probe.measure_copies(bench.rank().parts.groups, bench.arena.shape.slot_bytes)
    bench.close()
