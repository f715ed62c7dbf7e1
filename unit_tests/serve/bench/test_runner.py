import asyncio
from typing import Any

from serve.bench.client import CompletionClient
from serve.bench.flags import resolve_options
from serve.bench.metrics import RequestRecord
from serve.bench.options import ServeBenchOptions
from serve.bench.runner import play
from serve.bench.workload import Conversation, Turn
from unit_tests.serve.bench.fake_server import FakeServer, Script, event, head, plain, stream


def turns(*words: str) -> tuple[Turn, ...]:
    return tuple(Turn(word, 10, 2) for word in words)


def run(
    server: FakeServer, conversations: list[Conversation], concurrency: int | None = None, endpoint: str = "completions"
) -> tuple[list[RequestRecord], int]:
    """The records, and how often `on_done` was called."""
    options = resolve_options(
        ServeBenchOptions, {"base_url": server.base_url, "model": "m", "endpoint": endpoint, "timeout": 20}
    )
    done: list[RequestRecord] = []
    work = play(CompletionClient(options), conversations, options.endpoint, concurrency, done.append)
    return asyncio.run(work), len(done)


def answer_a(path: str, body: dict[str, Any]) -> Script:
    return stream(2, 0.02, 0.0, None, word=" a")


def test_histories_grow_with_the_real_answers() -> None:
    with FakeServer(answer_a) as server:
        records, num_done = run(server, [Conversation(turns(" one", " two", " three"), 0.0)])
    assert [body["prompt"] for body in server.requests] == [
        " one", " one a a two", " one a a two a a three",
    ]  # fmt: skip
    assert [(r.turn, r.input_tokens) for r in records] == [(0, 10), (1, 22), (2, 34)]
    assert num_done == 3


def test_chats_grow_as_messages() -> None:
    def answer(path: str, body: dict[str, Any]) -> Script:
        assert path == "/v1/chat/completions"
        opening = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
        return [(0.0, head() + opening + event(choices=[{"delta": {"content": "hello"}}]) + b"0\r\n\r\n")]

    with FakeServer(answer) as server:
        run(server, [Conversation(turns("one", "two"), 0.0)], endpoint="chat")
    assert server.requests[1]["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "two"},
    ]


def test_concurrency_is_the_most_in_flight() -> None:
    conversations = [Conversation(turns(" x"), 0.0) for _ in range(6)]
    with FakeServer(answer_a) as server:
        records, _ = run(server, conversations, concurrency=2)
    assert server.most_in_flight == 2
    assert sorted(r.conversation for r in records) == list(range(6))
    with FakeServer(lambda path, body: stream(1, 0.3, 0.0, None)) as server:
        run(server, conversations)
    assert server.most_in_flight == 6


def test_a_conversation_starts_when_it_is_due() -> None:
    with FakeServer(answer_a) as server:
        records, _ = run(server, [Conversation(turns(" x"), 0.2), Conversation(turns(" y"), 0.0)])
    assert records[0].start - records[1].start >= 0.19


def test_a_failed_turn_ends_its_conversation_only() -> None:
    def answer(path: str, body: dict[str, Any]) -> Script:
        return plain("500 Oops", b"broken") if body["prompt"] == " bad" else answer_a(path, body)

    with FakeServer(answer) as server:
        records, _ = run(server, [Conversation(turns(" bad", " x"), 0.0), Conversation(turns(" good", " y"), 0.0)])
    assert [(r.conversation, r.turn, r.failure) for r in records] == [(0, 0, "http_500"), (1, 0, None), (1, 1, None)]
