"""Gemma 3 270m with its real weights: windows and full attention, in float32 against transformers, in every tier."""

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from teacher_forcing import TeacherForced
from tiny_engine import Answer, CacheServer

NUM_TOKENS = 32
NUM_HIT_TOKENS = 8
ATTEMPTS = 3
PAGE = 64
LENGTHS = [20, 64, 65, 150, 300, 512, 513, 700, 1200, 2000]  # the window is 512
PROSE = (
    "A varve is an annual layer of sediment. In lakes that freeze, coarse grains settle in summer and fine clay "
    "settles in winter, so that each pair of layers marks a year. Counting {n} of them dates the retreat of glaciers, "
    "item {n}. "
)
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def load_reference(path: Path) -> transformers.Gemma3ForCausalLM:
    """Gemma3ForCausalLM in float32 with the file's weights, dequantised by the gguf library."""
    reader = gguf.GGUFReader(path)

    def value(name: str) -> Any:
        return reader.get_field(f"gemma3.{name}").contents()

    config = transformers.Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        head_dim=value("attention.key_length"),
        sliding_window=value("attention.sliding_window"),
        max_position_embeddings=value("context_length"),
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-6,
    )
    model = transformers.Gemma3ForCausalLM(config).float().eval()
    state = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        kind = tensor.name.removesuffix(".weight").split(".")
        name = f"model.layers.{kind[1]}.{NAMES[kind[2]]}" if kind[0] == "blk" else TOP_NAMES[kind[0]]
        state[f"{name}.weight"] = weight - 1 if "norm" in name else weight  # the converter adds one
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


@pytest.fixture(scope="module")
def gemma_gguf() -> Path:
    """The packaged model's GGUF file."""
    from models.source import resolve_model

    return Path(resolve_model("gemma3-270m").path)


@pytest.fixture(scope="module")
def reference(gemma_gguf: Path) -> Iterator[TeacherForced]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield TeacherForced(load_reference(gemma_gguf))
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def served(start_server: Any, gemma_gguf: Path) -> Iterator[CacheServer]:
    flags = ("--data_type", "float32", "--max_req_total_len", "2100", "--cpu_cache_token_page_size", str(PAGE))
    tiers = ("--enable_cpu_cache", "--cpu_cache_storage_size", "0.5", "--cpu_cache_load_policy", "always")
    with start_server(*flags, *tiers, model="gemma3-270m") as server:
        yield CacheServer(server, None)


@pytest.fixture(scope="module")
def prompts(served: CacheServer) -> list[list[int]]:
    """Prose of its own each, begun by the token that begins every text, cut to LENGTHS."""
    made = []
    with served.server.client() as client:
        for index, length in enumerate(LENGTHS):
            text = "".join(PROSE.format(n=index * 1000 + line) for line in range(length // 20 + 1))
            body = {"model": served.server.model, "prompt": text}
            made.append(client.post("/tokenize", json=body).json()["tokens"][:length])
    assert [len(prompt) for prompt in made] == LENGTHS
    assert all(prompt[0] == 2 for prompt in made)
    return made


@pytest.fixture(scope="module")
def cold(served: CacheServer, prompts: list[list[int]]) -> list[Any]:
    """Answers of misses, asked for together."""
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: served.ask(prompt, NUM_TOKENS), prompts))


def usable(prompt: list[int]) -> int:
    return (len(prompt) - 1) // PAGE * PAGE


def test_ten_prompts_equal_the_reference(cold: Any, prompts: Any, reference: TeacherForced):
    for prompt, answer in zip(prompts, cold, strict=True):
        assert answer.cached == 0
        assert len(answer.tokens) == NUM_TOKENS
        reference.check(prompt, answer.tokens)


def test_hits_on_the_device_give_the_same_text(served: CacheServer, cold: Any, prompts: Any):
    for prompt, miss in zip(prompts, cold, strict=True):
        answer = served.ask(prompt, NUM_HIT_TOKENS)
        assert (answer.device, answer.host) == (usable(prompt), 0)
        assert answer.tokens == miss.tokens[:NUM_HIT_TOKENS]


def test_hits_in_host_memory_give_the_same_text(served: CacheServer, cold: Any, prompts: Any):
    for prompt, miss in zip(prompts, cold, strict=True):
        answer = host_hit(served, prompt)
        assert (answer.device, answer.host) == (0, usable(prompt))
        assert answer.tokens == miss.tokens[:NUM_HIT_TOKENS]


def host_hit(served: CacheServer, prompt: list[int]) -> Answer:
    """A busy machine may make a load late, whose request then recomputes."""
    for _ in range(ATTEMPTS):
        served.flush_device()
        answer = served.ask(prompt, NUM_HIT_TOKENS)
        if answer.host == usable(prompt):
            break
    return answer


def test_a_prompt_that_is_text_begins_with_the_token_that_begins_texts(served: CacheServer, reference: TeacherForced):
    text = "The capital of France is"
    with served.server.client() as client:
        tokens = client.post("/tokenize", json={"model": served.server.model, "prompt": text}).json()["tokens"]
    assert tokens[0] == 2
    reference.check(tokens, served.ask(text, 8).tokens)  # type: ignore[arg-type]
