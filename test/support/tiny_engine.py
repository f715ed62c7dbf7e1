"""A tiny llama with its own reference, and what tests of the prompt cache ask of a running server."""

import contextlib
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from serve.httpserver.token_bytes import byte_characters
from serve.ipc.control import ControlError
from unit_tests.models.builders import hf_model, save

PAGE = 16
PAGE_BYTES = 8192  # float32: 2 layers, 2 kv heads, keys and values of 16 numbers, 16 tokens
NUM_TOKENS = 8
SHAPE = {"intermediate_size": 8192, "max_position_embeddings": 4096}
"""A wide MLP makes tokens dear and leaves pages small, so that a load pays even for one page."""
FLAGS = ("--data_type", "float32", "--cpu_cache_token_page_size", str(PAGE))
BOUNDARY_LENGTHS = [PAGE * pages + rest for pages in range(1, 9) for rest in (-1, 0, 1)]

Tokens = list[int]


class TinyModel:
    """A checkpoint on disk, and what transformers generates greedily from it. Thread-safe."""

    def __init__(self, directory: Path, scale: float = 1.0) -> None:
        """scale: of one weight; another one makes another model of the same shape."""
        self.path = directory
        self._model = hf_model("llama", **SHAPE)
        with torch.no_grad():
            self._model.model.layers[0].self_attn.v_proj.weight.mul_(scale)
        save(self._model, directory)
        save_byte_tokenizer(directory)
        self._known: dict[tuple[int, ...], Tokens] = {}
        self._lock = threading.Lock()

    def text(self, prompt: Tokens, num_tokens: int = NUM_TOKENS) -> Tokens:
        """The generated tokens, the end token not heeded."""
        key = (num_tokens, *prompt)
        with self._lock:
            if key not in self._known:
                self._known[key] = generate(self._model, prompt, num_tokens)
            return self._known[key]


def generate(model: transformers.PreTrainedModel, prompt: Tokens, num_tokens: int) -> Tokens:
    """transformers takes a 0 in the prompt for padding, unless it is given the mask."""
    options = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        made = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return list(made[0, len(prompt) :].tolist())


def save_byte_tokenizer(directory: Path) -> None:
    """tokenizer.json of one token a byte."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.save(str(directory / "tokenizer.json"))


def make_prompt(length: int, seed: Any) -> Tokens:
    """Random bytes that no other seed begins with."""
    generator = random.Random(repr(seed))
    return [generator.randrange(3, 256) for _ in range(length)]


@dataclass(frozen=True)
class Answer:
    """Generated tokens, and cached prompt tokens by tier."""

    tokens: Tokens
    device: int
    host: int
    disk: int

    @property
    def cached(self) -> int:
        return self.device + self.host + self.disk


def usable(prompt: Sequence[int]) -> int:
    """Prompt tokens that a full hit does not compute."""
    return (len(prompt) - 1) // PAGE * PAGE


class CacheServer:
    """A running server with a `TinyModel`, or another with a method `text`, seen from a test of its cache."""

    def __init__(self, server: Any, model: Any) -> None:
        self.server = server
        self.model = model

    def ask(self, prompt: Tokens, num_tokens: int = NUM_TOKENS, **options: Any) -> Answer:
        """One greedy answer. Raises httpx.HTTPError."""
        options = {"ignore_eos": True, "return_token_ids": True} | options
        body = self.server.complete(prompt, num_tokens, **options)
        tiers = body["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
        return Answer(body["choices"][0]["token_ids"], tiers["device"], tiers["host"], tiers["disk"])

    def check(self, prompt: Tokens, num_tokens: int = NUM_TOKENS, **options: Any) -> Answer:
        """As `ask`; the text must be that of the model without any cache."""
        answer = self.ask(prompt, num_tokens, **options)
        assert answer.tokens == self.model.text(prompt, num_tokens), (len(prompt), answer)
        return answer

    def check_all(self, prompts: Sequence[Tokens], num_threads: int = 1, **options: Any) -> list[Answer]:
        """`check` of each, so many at a time."""
        with ThreadPoolExecutor(num_threads) as pool:
            return list(pool.map(lambda prompt: self.check(prompt, **options), prompts))

    def call(self, part: str, method: str, **arguments: Any) -> Any:
        """A control call. Raises ControlError."""
        client = self.server.control(part)
        try:
            return client.call(method, **arguments)
        finally:
            client.close()

    def cache_statistics(self) -> dict[str, Any]:
        return dict(self.call("cache", "statistics"))

    def settle(self, deadline_s: float = 20.0) -> dict[str, Any]:
        """Until nothing runs, no job is under way and all that can be on disk is; the cache's statistics then."""
        end = time.monotonic() + deadline_s
        while True:
            with contextlib.suppress(ControlError):
                router, cache = self.call("router", "statistics"), self.cache_statistics()
                is_busy = not router["is_up"] or router["num_requests"] or router["jobs_in_flight"] or cache["leases"]
                is_busy = is_busy or cache["objects"]["durability"].get("persisting", 0)
                if not is_busy:
                    return cache
            assert time.monotonic() < end, f"not quiet after {deadline_s} s"
            time.sleep(0.02)

    def flush_device(self) -> None:
        """Every page leaves the device, once the tiers below have what they want."""
        self.settle()
        self.call("router", "flush")

    def check_clean(self, hung_jobs: int = 0) -> dict[str, Any]:
        """Idle, books in order in every process, no pin and no claim left, no page lost; the cache's statistics."""
        self.server.wait_until_idle()
        cache = self.settle() if not hung_jobs else self.cache_statistics()
        assert self.call("router", "check") == {"problems": []}
        assert self.call("cache", "check") == []
        assert self.call("worker-0", "check") == []
        groups = self.call("router", "statistics")["pages"]
        for pages in groups.values():
            assert pages["free"] + pages["used"] + pages["cached"] == pages["total"], pages
            assert hung_jobs or pages["used"] == 0, pages
        if not hung_jobs:
            slots = cache["slots"]
            assert slots["pinned"] == slots["filling"] == slots["blocked"] == 0, slots
            taken, num_objects = slots["backed"] - slots["free"], sum(cache["objects"]["content"].values())
            # Objects of several groups differ in size, and take several slots.
            assert taken == num_objects if len(groups) == 1 else taken >= num_objects, cache
        return cache


@dataclass
class Load:
    """Streams that ask for prompts at random, until told to stop; every full answer must be right."""

    server: CacheServer
    prompts: list[Tokens]
    num_streams: int = 16
    num_right: int = 0
    num_errors: int = 0  # answers that a dead process cost
    wrong: list[tuple[int, Tokens]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(index,), daemon=True) for index in range(self.num_streams)
        ]

    def __enter__(self) -> "Load":
        for prompt in self.prompts:
            self.server.model.text(prompt)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        deadline = time.monotonic() + 60
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in self._threads), "a request has not ended"

    def _run(self, index: int) -> None:
        generator = random.Random(index)
        while not self._stop.is_set():
            prompt = generator.choice(self.prompts)
            try:
                tokens = self.server.ask(prompt).tokens
            except httpx.HTTPError:
                with self._lock:
                    self.num_errors += 1
                time.sleep(0.25)
                continue
            with self._lock:
                if tokens == self.server.model.text(prompt):
                    self.num_right += 1
                else:
                    self.wrong.append((len(prompt), tokens))


def make_trees(num_roots: int, num_branches: int, seed: Any, length: int = 5 * PAGE) -> list[Tokens]:
    """Prompts that share their first pages with others."""
    roots = [make_prompt(length, (seed, root)) for root in range(num_roots)]
    return [
        root + make_prompt(PAGE * (branch % 4) + 3 + branch, (seed, index, branch))
        for index, root in enumerate(roots)
        for branch in range(num_branches)
    ]
