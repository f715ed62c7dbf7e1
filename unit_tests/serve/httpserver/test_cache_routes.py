"""Operating the cache over HTTP: keys, bodies, and what is answered when nobody is there."""

import threading

import pytest

from serve.ipc.control import ControlServer

HEADERS = {"authorization": "Bearer boss"}
ROUTES = [("GET", "/cache/stats"), ("GET", "/cache/ls"), ("POST", "/cache/check"), ("POST", "/flush_cache")]


async def send(bench, method, path, **options):
    async with bench.client() as client:
        return await client.request(method, path, **options)


@pytest.fixture
def parts(run_dir):
    """Control sockets of a router and a cache manager; the calls that came."""
    calls, ends = [], threading.Event()

    def told(name, answer):
        return lambda **arguments: calls.append((name, arguments)) or answer

    router = {
        "statistics": {"tiers": {}, "pages": {}},
        "check": {"problems": []},
        "flush": {"num_dropped": 1, "num_referenced": 2},
        "open_tiers": {},
        "root": "ab",
    }
    cache = {
        "statistics": {"slots": {"total": 3}},
        "check": ["odd"],
        "flush": {"dropped": 3, "lower_dropped": 4, "leaving": 0},
        "ls": [{"name": "n"}],
    }
    servers = [
        ControlServer(
            run_dir, name, {method: told(f"{name[8:]}.{method}", answer) for method, answer in answers.items()}
        )
        for name, answers in (("control-router", router), ("control-cache", cache))
    ]

    def answer():
        while not ends.wait(0.01):
            for server in servers:
                server.run_pending()

    thread = threading.Thread(target=answer)
    thread.start()
    yield calls
    ends.set()
    thread.join()
    for server in servers:
        server.close()


def test_the_admin_key_is_needed(build, run, run_dir):
    for method, path in ROUTES:
        assert run(send(build(run_dir=run_dir), method, path)).status_code == 403
        bench = build(run_dir=run_dir, admin_api_key="boss")
        assert run(send(bench, method, path)).status_code == 401
        refused = run(send(bench, method, path, headers=HEADERS))
        assert refused.status_code == 503, "nobody is there"
        assert refused.json()["error"]["code"] == "cache_unavailable"
        assert run(send(build(admin_api_key="boss"), method, path, headers=HEADERS)).status_code == 503


def test_answers_are_those_of_the_parts(build, run, run_dir, parts):
    bench = build(run_dir=run_dir, admin_api_key="boss")
    stats = run(send(bench, "GET", "/cache/stats", headers=HEADERS)).json()
    assert [tier["tier"] for tier in stats["tiers"]] == ["device", "host"]
    assert stats["away"] == {}
    assert run(send(bench, "GET", "/cache/ls?limit=5&cache_salt=s", headers=HEADERS)).json() == {
        "pages": [{"name": "n"}]
    }
    assert ("router.root", {"salt": "s"}) in parts
    assert ("cache.ls", {"limit": 5, "root": "ab"}) in parts
    checked = run(send(bench, "POST", "/cache/check", headers=HEADERS)).json()
    assert checked == {"problems": {"router": [], "cache": ["odd"]}}


@pytest.mark.parametrize(("body", "arguments"), [(b"", {}), (b"{}", {}), (b'{"cache_salt": "s"}', {"root": "ab"})])
def test_a_flush_reaches_all_tiers(build, run, run_dir, parts, body, arguments):
    bench = build(run_dir=run_dir, admin_api_key="boss")
    answer = run(send(bench, "POST", "/flush_cache", headers=HEADERS, content=body))
    assert answer.json() == {"device_pages": 1, "device_pages_in_use": 2, "host_objects": 3, "disk_objects": 4}
    assert [name for name, _ in parts if name != "router.root"] == ["router.flush", "cache.flush", "router.open_tiers"]
    assert ("cache.flush", arguments) in parts


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"salt": "s"}', b'{"cache_salt": 3}'])
def test_a_wrong_body_flushes_nothing(build, run, run_dir, parts, body):
    bench = build(run_dir=run_dir, admin_api_key="boss")
    assert run(send(bench, "POST", "/flush_cache", headers=HEADERS, content=body)).status_code == 400
    assert run(send(bench, "GET", "/cache/ls?limit=-1", headers=HEADERS)).status_code in (400, 422)
    assert parts == []
