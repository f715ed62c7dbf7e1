import msgspec
import pytest

from serve.ipc.messages import CacheDown, JobAnswer, JoinRow, Message, RequestOutput, StepPlan
from serve.ipc.wire import MalformedFrameError, decode, encode
from serve.types import JobId, JobResult


def test_every_message_type_has_its_own_tag() -> None:
    types = Message.__subclasses__()
    assert len({kind.__name__ for kind in types}) == len(types) > 20


def test_nested_values_keep_their_types() -> None:
    message = JobAnswer(JobId(3, 4), rank=1, result=JobResult.DROPPED, detail="full")
    decoded = decode(encode(message))
    assert decoded == message
    assert isinstance(decoded, JobAnswer)
    assert decoded.result is JobResult.DROPPED


def test_a_message_without_fields_survives() -> None:
    assert decode(encode(CacheDown())) == CacheDown()


def test_a_struct_that_is_no_message_is_malformed() -> None:
    with pytest.raises(MalformedFrameError):
        decode(msgspec.msgpack.encode(RequestOutput(1, 1, [2])))


def test_a_plan_without_states_beside_full_ones_names_none_and_with_them_keeps_them() -> None:
    plain = decode(encode(StepPlan(1, 2, joins=[JoinRow(0, 1, 1, 5, 5, 0, {"full": [3]})])))
    assert (plain.snapshots, plain.joins[0].first_places, plain.joins[0].restores) == ([], {}, {})
    join = JoinRow(0, 1, 1, 40, 40, 32, {"full": [3], "window": [4], "state": [7]}, {"window": 1}, {"state": 6})
    plan = StepPlan(1, 2, joins=[join], snapshots=[(0, "state", 9)])
    assert decode(encode(plan)) == plan
