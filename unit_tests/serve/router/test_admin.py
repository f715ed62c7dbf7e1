"""What the control plane sees and does."""

import msgspec

from serve.router.admin import RouterAdmin
from unit_tests.serve.router.router_fakes import Harness, prompt_of


def test_everything_is_plain_data_at_any_time():
    harness = Harness()
    admin = RouterAdmin(harness.router)
    harness.submit(prompt_of(40), max_tokens=20)
    harness.step_all()
    admin.flush()  # the second one finds nothing
    for name, handler in admin.handlers().items():
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(handler())) == handler(), name


def test_an_engine_that_is_not_up_answers_too():
    harness = Harness()
    admin = RouterAdmin(harness._make_router())
    assert admin.status()["is_up"] is False
    assert admin.check() == {"problems": []}
    assert admin.flush() is None
    admin.pause()
    admin.statistics()


def test_counts_follow_a_request():
    harness = Harness()
    admin = RouterAdmin(harness.router)
    harness.submit(prompt_of(40), max_tokens=4)
    harness.step_all()
    (entry,) = admin.list_requests()
    assert (entry["num_prompt"], entry["row"], entry["pages"]) == (40, 0, {"full": 3})
    harness.run()
    harness.submit(prompt_of(40), max_tokens=4)
    harness.run()
    found = admin.statistics()
    assert found["num_submitted"] == 2
    assert found["num_prompt_tokens"] == 80
    assert found["num_generated_tokens"] == 8
    assert found["cached_tokens"] == {"device": 32, "host": 0, "disk": 0}
    assert found["finished"] == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    assert sum(found["first_token_s"]["counts"]) == 2
    assert sum(found["step_s"]["counts"]) == found["num_steps"]
    pages = found["pages"]["full"]
    assert pages["free"] + pages["used"] + pages["cached"] == pages["total"]


def test_flush_empties_the_index_but_not_what_runs():
    harness = Harness()
    admin = RouterAdmin(harness.router)
    harness.submit(prompt_of(40), max_tokens=2)
    harness.run()
    client = harness.submit(prompt_of(40, 1), max_tokens=30)
    harness.step_all()
    assert admin.flush() == {"num_dropped": 2, "num_referenced": 2}
    harness.run()
    harness.check_tokens(client)
    harness.check_idle()


def test_a_flush_of_one_root_leaves_the_pages_of_others():
    harness = Harness()
    admin = RouterAdmin(harness.router)
    prompt = prompt_of(40)
    for salt in (None, b"", b"tenant"):
        harness.submit(prompt, max_tokens=2, salt=salt)
        harness.run()
    root = admin.root("tenant")
    assert admin.flush(root=root) == {"num_dropped": 2, "num_referenced": 0}
    assert admin.flush(root=root) == {"num_dropped": 0, "num_referenced": 0}
    for salt, num_cached in ((None, 32), (b"", 32), (b"tenant", 0)):
        client = harness.submit(prompt, max_tokens=2, salt=salt)
        harness.run()
        assert client.outputs[0].cached_tokens[0] == num_cached, salt
    assert harness.ledger.check_integrity() == []


def test_pause_holds_new_requests_and_resume_admits_them():
    harness = Harness()
    admin = RouterAdmin(harness.router)
    running = harness.submit(prompt_of(10), max_tokens=10)
    assert admin.pause()["is_admitting"] is False
    waiting = harness.submit(prompt_of(10, 1), max_tokens=10)
    harness.run()
    harness.check_tokens(running)
    assert not waiting.outputs
    admin.resume()
    harness.router.turn([])
    harness.run()
    harness.check_tokens(waiting)
    assert admin.check() == {"problems": []}


def test_check_reports_pages_that_nobody_could_be_using():
    harness = Harness()
    harness.ledger.extend(harness.ledger.acquire(harness.ledger.match([], 1)), "full", 1)
    assert RouterAdmin(harness.router).check()["problems"]
