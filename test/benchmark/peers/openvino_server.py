"""A small OpenAI-compatible streaming server over OpenVINO GenAI's continuous batching, for comparisons only.

Run by hand in an environment of its own (see README.md): `python openvino_server.py MODEL.gguf --port 8100`.
It knows what the load generator sends: `/v1/models` and streamed `/v1/completions` with text or token ids.
"""

import argparse
import asyncio
import itertools
import json
import queue
import threading
import time

import numpy as np
import openvino as ov
import openvino_genai as genai
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse


class Engine:
    """Steps the pipeline in a thread of its own; every request has an asyncio queue of (piece of text, is last)."""

    def __init__(self, model, cache_gib, batch_tokens):
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        scheduler.max_num_batched_tokens = batch_tokens
        self.pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
        self.tokenizer = self.pipeline.get_tokenizer()
        self.ids = itertools.count()
        self.incoming = queue.Queue()
        self.active = {}
        threading.Thread(target=self.run, daemon=True).start()

    def submit(self, token_ids, max_tokens, ignore_eos, temperature):
        """Queue a request; the answer's pieces arrive on the returned asyncio queue."""
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = ignore_eos
        config.do_sample = temperature > 0
        if temperature > 0:
            config.temperature = temperature
        pieces = asyncio.Queue()
        self.incoming.put((token_ids, config, asyncio.get_running_loop(), pieces))
        return pieces

    def run(self):
        while True:
            self.admit(block=not self.active)
            self.pipeline.step()
            self.deliver()
            time.sleep(0.0005)  # a step may hold the interpreter's lock: let the HTTP thread send what there is

    def admit(self, block):
        """Hand all waiting requests to the pipeline; wait for one when there is nothing else to do."""
        while block or not self.incoming.empty():
            token_ids, config, loop, pieces = self.incoming.get()
            block = False
            number = next(self.ids)
            handle = self.pipeline.add_request(number, ov.Tensor(np.asarray([token_ids], dtype=np.int64)), config)
            self.active[number] = (handle, loop, pieces)

    def deliver(self):
        """Send what the step gave, decoded in one call."""
        fresh = []
        for number, (handle, loop, pieces) in list(self.active.items()):
            while handle.can_read():
                for output in handle.read().values():
                    last = output.finish_reason != genai.GenerationFinishReason.NONE
                    fresh.append((list(output.generated_ids), last, loop, pieces))
                    if last:
                        self.active.pop(number, None)
        texts = self.tokenizer.decode([ids for ids, *_ in fresh]) if fresh else []
        for (ids, last, loop, pieces), text in zip(fresh, texts, strict=True):
            loop.call_soon_threadsafe(pieces.put_nowait, (text, len(ids), last))


def make_app(engine, name):
    app = FastAPI()

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "peer"}]}

    @app.post("/v1/completions")
    async def completions(request: Request):
        body = await request.json()
        prompt = body["prompt"]
        ids = engine.tokenizer.encode(prompt).input_ids.data[0].tolist() if isinstance(prompt, str) else prompt
        pieces = engine.submit(
            ids, body.get("max_tokens", 16), body.get("ignore_eos", False), body.get("temperature", 1.0)
        )
        return StreamingResponse(stream(pieces, name, len(ids)), media_type="text/event-stream")

    return app


async def stream(pieces, name, num_prompt):
    head = {"id": f"cmpl-{time.time_ns()}", "object": "text_completion", "created": int(time.time()), "model": name}
    count, last = 0, False
    while not last:
        text, tokens, last = await pieces.get()
        count += tokens
        yield event(head | {"choices": [{"index": 0, "text": text, "finish_reason": "length" if last else None}]})
    usage = {"prompt_tokens": num_prompt, "completion_tokens": count, "total_tokens": num_prompt + count}
    yield event(head | {"choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def event(data):
    return f"data: {json.dumps(data)}\n\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="GGUF file, or a directory that optimum-intel exported")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--cache_gib", type=int, default=1)
    parser.add_argument("--batch_tokens", type=int, default=512)
    args = parser.parse_args()
    engine = Engine(args.model, args.cache_gib, args.batch_tokens)
    uvicorn.run(make_app(engine, "openvino"), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
