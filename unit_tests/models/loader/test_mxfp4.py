"""MXFP4 blocks against what transformers makes of them, and through a whole checkpoint."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from models.loader.mxfp4 import dequantize_mxfp4
from unit_tests.models.builders import PagedRunner, ThreadGroup, load
from unit_tests.models.state_families import build, logits_of, save, some_tokens


def random_blocks(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)


def test_blocks_are_what_transformers_reads():
    blocks, scales = random_blocks(3, 10, 2)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, in, out]
    assert torch.equal(dequantize_mxfp4(blocks, scales).transpose(1, 2), expected)


def test_the_smallest_and_largest_exponents():
    blocks = torch.full((2, 16), 0x21, dtype=torch.uint8)  # 0.5, then 1
    values = dequantize_mxfp4(blocks, torch.tensor([1, 250], dtype=torch.uint8))
    assert values[0] == 0.5 * 2.0**-126
    assert values[33] == 2.0**123


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A checkpoint whose experts are blocks, and transformers' model with the values of these blocks."""
    model = build("gpt_oss", hidden_size=64, intermediate_size=64)
    directory = save(model, tmp_path_factory.mktemp("packed"))
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks, scales = random_blocks(experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        values = dequantize_mxfp4(blocks, scales).transpose(1, 2)
        model.get_parameter(name).data.copy_(values)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory, model


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_of_blocks_gives_the_logits_of_its_values(packed, size):
    directory, model = packed
    tokens = some_tokens(60, 1)
    expected = logits_of(model, tokens)
    for ours in ThreadGroup(size).run(lambda tp: PagedRunner(load(directory, tp=tp).model).step([(0, tokens)])):
        assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
