"""Slots, engine restarts, deadlines and departures."""

import asyncio
import itertools
import json

import httpx
import numpy as np
import pytest

from serve.httpserver.errors import ApiError
from serve.httpserver.generation import GenerationSpec
from serve.httpserver.sequence import Sequence, TextRules
from serve.ipc.messages import AbortRequest, OutputBatch, RequestOutput, SubmitRequest
from serve.types import FinishReason, SamplingParams

URL = "/v1/completions"
BODY = {"model": "smol", "prompt": "Hi", "max_tokens": 200}


def spec(n: int = 1) -> GenerationSpec:
    return GenerationSpec("id", [np.array([5, 6], np.uint32)], SamplingParams(max_tokens=50), n, TextRules())


async def wait_for(condition, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def test_slots_run_out_and_come_back(bench, run):
    async def scenario():
        bench.router.auto = False
        first = bench.service.start(spec(8))
        with pytest.raises(ApiError) as caught:
            bench.service.start(spec())
        assert caught.value.status == 429
        bench.service.close(first)
        await asyncio.sleep(0)
        bench.service.close(bench.service.start(spec(8)))
        await asyncio.sleep(0)
        bench.check_idle()

    run(scenario())


def test_a_released_slot_gets_a_new_generation_and_stale_outputs_are_dropped(bench, run):
    async def scenario():
        bench.router.auto = False
        first = bench.service.start(spec(8))
        (stale,) = bench.router.of_type(SubmitRequest)[:1]
        bench.service.close(first)
        await asyncio.sleep(0)
        second = bench.service.start(spec(8))
        output = RequestOutput(stale.slot, stale.generation, [9], FinishReason.STOP)
        bench.service.handle([OutputBatch([output])])
        assert bench.service.num_active == 8
        bench.service.close(second)

    run(scenario())


def test_a_restarted_process_takes_no_slot_that_is_in_use(bench, run, tokenizer):
    from serve.httpserver.metrics import HttpMetrics
    from serve.httpserver.request_service import RequestService

    async def scenario():
        bench.router.auto = False
        bench.service.start(spec(3))
        again = RequestService(
            bench.service.settings, bench.table, tokenizer, lambda epoch: bench.router, HttpMetrics()
        )
        again.engine_up(1, b"n", b"k")
        assert again.num_free_slots == 5

    run(scenario())


def test_slots_filled_for_a_dead_router_are_handed_to_the_next(bench, run):
    async def scenario():
        bench.router.auto = False
        bench.router.full = True  # what is sent now is lost
        with pytest.raises(ApiError):
            bench.service.start(spec(8))
        bench.router.full = False
        assert bench.service.num_free_slots == 0
        bench.engine_up()
        await asyncio.sleep(0)
        assert bench.service.num_free_slots == 8
        bench.check_idle()

    run(scenario())


def test_slots_of_a_request_that_cannot_be_filled_whole_come_back(bench, run, monkeypatch):
    async def scenario():
        bench.router.auto = False
        fill, calls = bench.table.fill, itertools.count()

        def fill_two(*arguments):
            if next(calls) == 2:
                raise ValueError("no more")
            return fill(*arguments)

        monkeypatch.setattr(bench.table, "fill", fill_two)
        with pytest.raises(ApiError) as caught:
            bench.service.start(spec(3))
        assert caught.value.status == 400
        await asyncio.sleep(0)
        monkeypatch.undo()
        bench.service.close(bench.service.start(spec(8)))
        await asyncio.sleep(0)
        bench.check_idle()

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_engine_death_fails_running_requests(bench, run, stream):
    async def scenario():
        bench.router.auto = False
        bench.says("one two three four")
        async with bench.client() as client:
            answer = asyncio.ensure_future(client.post(URL, json={**BODY, "stream": stream}))
            await wait_for(lambda: bench.router.running)
            bench.router.step()
            await asyncio.sleep(0.01)
            bench.service.engine_down("a worker died")
            response = await answer
            assert (await client.post(URL, json=BODY)).status_code == 503
            bench.table.release_all()
            bench.engine_up()
            bench.router.auto = True
            assert (await client.post(URL, json=BODY)).status_code == 200
        return response

    response = run(scenario())
    if stream:
        assert response.status_code == 200
        events = [line for line in response.text.split("\n\n") if line]
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert error["code"] == "engine_unavailable"
    else:
        assert response.status_code == 503
        assert response.headers["retry-after"]
    bench.check_idle()


def test_a_request_that_takes_too_long_is_aborted(build, run):
    bench = build(timeout_s=0.05)

    async def scenario():
        bench.router.auto = False
        async with bench.client() as client:
            return await client.post(URL, json=BODY)

    response = run(scenario())
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    assert len(bench.router.of_type(AbortRequest)) == 1
    bench.check_idle()


def test_one_failed_choice_ends_the_request(bench, run):
    async def scenario():
        bench.router.auto = False
        async with bench.client() as client:
            answer = asyncio.ensure_future(client.post(URL, json={**BODY, "n": 3}))
            await wait_for(lambda: len(bench.router.running) == 3)
            submit = bench.router.of_type(SubmitRequest)[1]
            output = RequestOutput(submit.slot, submit.generation, [], FinishReason.ERROR, error="not finite")
            bench.router.running.pop(submit.slot)
            bench.table.mark_released(submit.slot, submit.generation)
            bench.service.handle([OutputBatch([output])])
            return await answer

    response = run(scenario())
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "not finite"
    bench.check_idle()


def test_an_output_that_cannot_be_made_into_text_ends_its_request_only(bench, run, monkeypatch):
    advance = Sequence.advance

    def fail_on_first(sequence, output):
        if output.slot == bench.router.seen[0].message.slot:
            raise ZeroDivisionError("a bug")
        return advance(sequence, output)

    monkeypatch.setattr(Sequence, "advance", fail_on_first)

    async def scenario():
        async with bench.client() as client:
            return await asyncio.gather(*(client.post(URL, json=BODY) for _ in range(2)))

    first, second = run(scenario())
    assert {first.status_code, second.status_code} == {500, 200}
    assert len(bench.router.of_type(AbortRequest)) == 1
    bench.check_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_aborted_at_once(bench, run, serve_app, stream):
    async def scenario():
        bench.router.auto = False
        bench.says("word " * 150)
        async with serve_app(bench.app) as url:
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            body = json.dumps({**BODY, "stream": stream, "n": 2}).encode()
            head = ["Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
            writer.write("\r\n".join([f"POST {URL} HTTP/1.1", *head, "", ""]).encode() + body)
            await wait_for(lambda: len(bench.router.running) == 2)
            bench.router.step()
            if stream:
                await reader.readuntil(b"data: ")
            writer.transport.abort()
            await wait_for(lambda: len(bench.router.of_type(AbortRequest)) == 2, 0.5)
            bench.check_idle()

    run(scenario())


def test_a_large_body_is_answered_over_a_real_connection(bench, run, serve_app):
    async def scenario():
        async with serve_app(bench.app) as url, httpx.AsyncClient() as client:

            async def hundred_megabytes():
                for _ in range(100):
                    yield b"x" * (1 << 20)

            headers = {"content-type": "application/json"}
            for content in (b"x" * (100 << 20), hundred_megabytes()):
                response = await client.post(url + URL, content=content, headers=headers)
                assert response.status_code == 413
            assert (await client.post(url + URL, json=BODY)).status_code == 200

    run(scenario())


def test_a_slow_reader_gets_everything(bench, run, serve_app):
    async def scenario():
        text = "word " * 100
        bench.says(text)
        async with serve_app(bench.app) as url, httpx.AsyncClient() as client:
            found = ""
            async with client.stream("POST", url + URL, json={**BODY, "stream": True}) as response:
                async for line in response.aiter_lines():
                    await asyncio.sleep(0.001)
                    if line.startswith("data: {"):
                        found += json.loads(line[6:])["choices"][0]["text"]
        assert found == text

    run(scenario())
