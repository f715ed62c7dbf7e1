import json

from serve.bench.client import Answer, CompletionClient, read_answer
from serve.bench.flags import resolve_options
from serve.bench.http_stream import Failure, FailureKind, Response
from serve.bench.options import ServeBenchOptions


def answer(*events: object, status: int = 200) -> Answer:
    """The answer read from events that came at 11, 12, 13 ... of a request sent at 10."""
    reads = [(11.0 + i, f"data: {json.dumps(event)}\n\n".encode()) for i, event in enumerate(events)]
    response = Response(start=10.0, end=11.0 + len(events), status=status, reads=[*reads, (99.0, b"data: [DONE]\n\n")])
    return read_answer(response)


def text(piece: str | None, reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"text": piece, "finish_reason": reason}]}


def delta(reason: str | None = None, **fields: object) -> dict[str, object]:
    return {"choices": [{"delta": fields, "finish_reason": reason}]}


def test_completion_events_give_text_and_times() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    got = answer(text("a"), text(""), text("b", "length"), {"choices": [], "usage": usage})
    assert (got.text, got.event_times, got.failure) == ("ab", [11.0, 12.0, 13.0], None)
    assert got.usage is not None
    assert got.usage.completion_tokens == 3


def test_an_event_that_only_closes_the_stream_is_no_token() -> None:
    assert answer(text("a"), text("", "stop")).event_times == [11.0]


def test_chat_events_count_from_the_first_content() -> None:
    got = answer(delta(role="assistant", content=""), delta(reasoning_content="r"), delta(content="b"), delta("stop"))
    assert (got.text, got.event_times) == ("rb", [12.0, 13.0])


def test_the_last_usage_counts() -> None:
    got = answer(text("a") | {"usage": {"completion_tokens": 1}}, text("b") | {"usage": {"completion_tokens": 2}})
    assert got.usage is not None
    assert got.usage.completion_tokens == 2


def test_an_error_event_is_a_failure_that_says_what_the_server_said() -> None:
    got = answer(text("a"), {"error": {"message": "overloaded"}})
    assert got.failure == Failure(FailureKind.STREAM_ERROR, '{"message":"overloaded"}')


def test_a_bad_event_and_an_empty_stream_are_failures() -> None:
    bad, empty = answer(text("a"), [1]).failure, answer().failure
    assert bad is not None
    assert empty is not None
    assert (bad.kind, empty.kind) == (FailureKind.PROTOCOL, FailureKind.NO_OUTPUT)


def test_another_status_is_a_failure_with_one_line_of_the_body() -> None:
    response = Response(start=1.0, end=2.0, status=400, reads=[(1.5, b'{"error":\n "bad"}')])
    assert read_answer(response).failure == Failure(FailureKind.HTTP_STATUS, '400 {"error": "bad"}')


def body(prompt: object, **values: object) -> dict[str, object]:
    client = CompletionClient(resolve_options(ServeBenchOptions, {"model": "m", **values}))
    decoded: dict[str, object] = json.loads(client.body(prompt, 5))  # type: ignore[arg-type]
    return decoded


def test_bodies_ask_for_a_greedy_stream_of_exact_length_with_usage() -> None:
    assert body([1, 2]) == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_bodies_for_servers_that_differ() -> None:
    assert "ignore_eos" not in body("x", ignore_eos=False)
    assert (
        body("x", extra_body={"stream_options": None, "top_k": 1}).items()
        >= {"stream_options": None, "top_k": 1}.items()
    )
    chat = body([{"role": "user", "content": "x"}], endpoint="chat")
    assert "prompt" not in chat
    assert chat["messages"] == [{"role": "user", "content": "x"}]
