"""Greedy text of the whole engine in float32 against transformers on the same dequantised weights."""

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

NUM_TOKENS = 64

SNIPPETS = [
    "The capital of France is",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "def quicksort(values):\n    if len(values) <= 1:\n        return values\n    pivot =",
    "Die Hauptstadt von Deutschland ist Berlin. Die Hauptstadt von Österreich ist",
    "El cielo es azul porque la luz del sol",
    "日本の首都は東京です。中国の首都は",
    "🙂🙃 emoji and ümlauts: čeština, français, ελληνικά, русский язык:",
    "1234567890 + 987654321 =",
    "SELECT name, COUNT(*) FROM orders\nWHERE",
    "<html>\n  <body>\n\t<h1>",
]
LENGTHS = [5, 63, 64, 65, 127, 128, 129, 500, 1000, 3000]
SALT = "greedy reference"
PROSE = (
    "A varve is an annual layer of sediment. In lakes that freeze, coarse grains settle in summer and fine clay "
    "settles in winter, so that each pair of layers marks a year. Counting {n} of them dates the retreat of glaciers, "
    "item {n}. "
)


def load_reference(path: Path) -> transformers.LlamaForCausalLM:
    """LlamaForCausalLM in float32 with the file's weights, dequantised by the gguf library."""
    reader = gguf.GGUFReader(path)

    def value(name: str) -> Any:
        return reader.get_field(f"llama.{name}").contents()

    heads, kv_heads = value("attention.head_count"), value("attention.head_count_kv")
    config = transformers.LlamaConfig(
        vocab_size=int(reader.get_field("llama.vocab_size").contents()),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        max_position_embeddings=value("context_length"),
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    state = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        kind = tensor.name.removesuffix(".weight").split(".")
        if kind[0] == "blk":
            if kind[2] in ("attn_q", "attn_k"):  # GGUF stores rotary pairs interleaved
                n = heads if kind[2] == "attn_q" else kv_heads
                weight = weight.view(n, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
            state[f"model.layers.{kind[1]}.{names[kind[2]]}.weight"] = weight
        else:
            state[{"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[kind[0]]] = weight
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model.eval()


def make_prompts(tokenize: Any) -> list[list[int]]:
    """20 prompts as token ids: short ones of many kinds, a chat too, and prose cut to lengths around pages' ends."""
    prompts = [tokenize(text) for text in SNIPPETS]
    for index, length in enumerate(LENGTHS):
        text = "".join(PROSE.format(n=index * 1000 + line) for line in range(length // 20 + 1))
        prompts.append(tokenize(text)[:length])
    assert [len(prompt) for prompt in prompts[10:]] == LENGTHS
    return prompts


def run_all(server: Any, prompts: list[list[int]], **options: Any) -> list[dict[str, Any]]:
    """All prompts at once; each body's only choice with its usage."""
    options = {"return_token_ids": True, "ignore_eos": True} | options
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        bodies = list(pool.map(lambda prompt: server.complete(prompt, NUM_TOKENS, **options), prompts))
    return [body["choices"][0] | {"usage": body["usage"]} for body in bodies]


class Reference(TeacherForced):
    """The file's model in transformers."""

    def __init__(self, path: Path) -> None:
        super().__init__(load_reference(path))

    def check(self, prompt: list[int], answer: list[int]) -> None:
        """The answer is whole, and the one that the model gives."""
        assert len(answer) == NUM_TOKENS
        super().check(prompt, answer)


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> Iterator[Reference]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield Reference(smollm2_gguf)
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def served(shared_server: Any) -> Any:
    return shared_server("--data_type", "float32")


@pytest.fixture(scope="module")
def prompts(served: Any) -> list[list[int]]:
    with served.client() as client:
        return make_prompts(
            lambda text: client.post("/tokenize", json={"model": served.model, "prompt": text}).json()["tokens"]
        )


@pytest.fixture(scope="module")
def cold(served: Any, prompts: list[list[int]]) -> list[dict[str, Any]]:
    return run_all(served, prompts, cache_salt=SALT)


def test_twenty_prompts_in_one_batch_equal_the_reference(cold: Any, prompts: Any, reference: Any):
    for prompt, choice in zip(prompts, cold, strict=True):
        reference.check(prompt, choice["token_ids"])
        assert choice["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_device_prefix_hit_gives_the_same_text(served: Any, prompts: Any, cold: Any):
    warm = run_all(served, prompts, cache_salt=SALT)
    for prompt, first, second in zip(prompts, cold, warm, strict=True):
        details = second["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == details["cached_tokens_by_tier"]["device"] == (len(prompt) - 1) // 64 * 64
        assert second["token_ids"] == first["token_ids"]


def test_preemption_in_a_small_pool_gives_the_same_text(start_server: Any, prompts: Any, reference: Any):
    """Admission expects half of `max_tokens`, all of them are generated, and small pages leave no slack."""
    short = [prompt for prompt in prompts if len(prompt) < 130]
    flags = ("--max_total_token_num", "640", "--cpu_cache_token_page_size", "16")
    with start_server("--data_type", "float32", *flags) as server:
        choices = run_all(server, short)
        client = server.control("router")
        statistics = client.call("statistics")
        client.close()
    assert statistics["num_preemptions"] > 0, statistics
    for prompt, choice in zip(short, choices, strict=True):
        reference.check(prompt, choice["token_ids"])


def test_tensor_parallel_2_with_uneven_heads_gives_the_same_text(start_server: Any, prompts: Any, reference: Any):
    with start_server("--data_type", "float32", "--tp", "2") as server:
        choices = run_all(server, prompts)
    for prompt, choice in zip(prompts, choices, strict=True):
        reference.check(prompt, choice["token_ids"])
