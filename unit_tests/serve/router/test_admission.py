"""Who is refused, and how much room others are expected to need."""

from serve.router.admission import Admission, AdmissionLimits, OutputEstimate
from unit_tests.serve.router.test_request import make_request


def make_admission(max_total_len: int = 100, max_queue_size: int = 2) -> Admission:
    return Admission(AdmissionLimits(max_total_len, max_queue_size), page_size=16)


def test_a_prompt_needs_room_for_one_token_more():
    admission = make_admission()
    assert admission.refuse(99, 0, 1) is None
    refusal = admission.refuse(100, 0, 1)
    assert refusal is not None
    assert refusal.code == 400
    assert admission.refuse(0, 0, 1).code == 400


def test_requests_that_a_free_row_awaits_do_not_fill_the_queue():
    admission = make_admission(max_queue_size=0)
    assert admission.refuse(10, num_waiting=3, num_free_rows=4) is None
    assert admission.refuse(10, num_waiting=4, num_free_rows=4).code == 429


def test_a_request_is_cut_at_the_limit():
    admission = make_admission()
    assert admission.total_limit(90, 50) == 100
    assert admission.total_limit(10, 50) == 60
    assert admission.total_limit(10, 0) == 11


def test_growth_follows_the_measured_share_and_the_last_token_needs_no_room():
    admission = make_admission(max_total_len=1000)
    request = make_request(num_prompt=16)
    request.limit = 16 + 33
    admission.estimate.fraction = 1.0
    assert admission.expected_growth(request) == 2
    admission.estimate.fraction = 0.5
    assert admission.expected_growth(request) == 1


def test_a_request_that_was_preempted_is_expected_to_need_everything():
    admission = make_admission(max_total_len=1000)
    request = make_request(num_prompt=16)
    request.limit = 16 + 161
    admission.estimate.fraction = 0.1
    before = admission.expected_growth(request)
    request.num_preemptions = 1
    assert before < admission.expected_growth(request) == 10


def test_the_share_is_learnt_and_raised_by_preemptions():
    estimate = OutputEstimate(0.5)
    for _ in range(200):
        estimate.finished(10, 100)
    assert abs(estimate.fraction - 0.1) < 0.01
    estimate.preempted()
    assert estimate.fraction > 0.5
    for _ in range(500):
        estimate.finished(0, 100)
    assert estimate.fraction > 0
