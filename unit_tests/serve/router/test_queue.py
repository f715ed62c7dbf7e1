"""Order of the queue."""

from serve.router.queue import WaitingQueue
from unit_tests.serve.router.test_request import make_request


def test_arrival_decides_and_a_preempted_request_returns_to_its_place():
    queue = WaitingQueue()
    first, second, third = (make_request(order) for order in range(3))
    for request in (second, third, first):
        queue.add(request)
    assert list(queue) == [first, second, third]
    assert queue.discard(first)
    queue.add(first)
    assert list(queue) == [first, second, third]


def test_lower_priority_values_go_first():
    queue = WaitingQueue()
    late, soon = make_request(0, priority=1), make_request(1, priority=-1)
    queue.add(late)
    queue.add(soon)
    assert list(queue) == [soon, late]


def test_discarding_what_is_not_there_says_so():
    queue = WaitingQueue()
    queue.add(make_request(1))
    assert not queue.discard(make_request(1))
    assert not queue.discard(make_request(5))
    assert len(queue) == 1
