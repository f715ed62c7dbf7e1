"""Plans in flight: order, ranks, time."""

from serve.ipc.messages import StepResult
from serve.router.step_plan import Pipeline


def answer(step: int, rank: int = 0, compute_s: float = 0.1) -> StepResult:
    return StepResult(0, step, rank, compute_s)


def test_plans_end_in_order_once_all_ranks_answered():
    pipeline = Pipeline(num_ranks=2)
    for now in (1.0, 2.0):
        pipeline.add((), 0, 1, now)
    assert not pipeline.has_room
    assert pipeline.take(answer(1, 0))
    assert pipeline.take(answer(1, 1))
    assert pipeline.take(answer(0, 1, 0.3))
    assert pipeline.pop_ended(3.0) is None
    assert pipeline.take(answer(0, 0, 0.2))
    first, second = pipeline.pop_ended(3.0), pipeline.pop_ended(3.0)
    assert (first.step, first.compute_s, first.result.rank) == (0, 0.3, 0)
    assert second.step == 1
    assert pipeline.pop_ended(3.0) is None
    assert (pipeline.ended_step, len(pipeline)) == (1, 0)


def test_answers_to_plans_not_in_flight_are_told_apart():
    pipeline = Pipeline(num_ranks=1)
    assert not pipeline.take(answer(0))
    pipeline.add((), 0, 1, 1.0)
    assert not pipeline.take(answer(1))
    pipeline.take(answer(0))
    pipeline.pop_ended(2.0)
    assert not pipeline.take(answer(0))


def test_a_plan_starts_when_the_one_before_has_ended():
    pipeline = Pipeline(num_ranks=1)
    assert pipeline.started_at() is None
    pipeline.add((), 0, 1, 1.0)
    pipeline.add((), 0, 1, 1.5)
    assert pipeline.started_at() == 1.0
    pipeline.take(answer(0))
    pipeline.pop_ended(9.0)
    assert pipeline.started_at() == 9.0
