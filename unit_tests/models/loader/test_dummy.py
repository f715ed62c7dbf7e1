"""Dummy weights: shapes without files, the same at every size."""

import pytest
import torch

from models.source import resolve_model
from unit_tests.models.builders import PagedRunner, ThreadGroup, hf_model, load, save
from unit_tests.models.state_families import build

TOKENS = [1, 5, 9, 200, 33, 47]


def dummy(tmp_path, family="llama"):
    directory = save(hf_model(family), tmp_path / family)
    for file in directory.glob("*.safetensors"):
        file.unlink()
    return resolve_model(str(directory), load_format="dummy")


def test_it_runs_without_weight_files_and_depends_on_the_seed(tmp_path):
    source = dummy(tmp_path)
    logits = [PagedRunner(load(source, dummy_seed=seed).model).step([(0, TOKENS)]) for seed in (0, 0, 1)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert logits[0].std() > 0


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_ranks_hold_parts_of_the_same_weights(family, tmp_path):
    source = dummy(tmp_path, family)
    whole = PagedRunner(load(source).model).step([(0, TOKENS)])
    for part in ThreadGroup(2).run(lambda tp: PagedRunner(load(source, tp=tp).model).step([(0, TOKENS)])):
        assert torch.allclose(part, whole, atol=1e-5)


def test_values_are_small_and_centred(tmp_path):
    model = load(dummy(tmp_path)).model
    assert abs(model.embedding.mean()) < 1e-3
    assert 0.018 < model.embedding.std() < 0.022
    assert len(model.embedding.unique()) > 0.9 * model.embedding.numel()
    assert torch.equal(model.norm, torch.ones(64))


def test_random_weights_have_no_digest(tmp_path):
    assert load(dummy(tmp_path)).block_digests == {}


def test_ranks_hold_parts_of_the_same_stacked_experts(tmp_path):
    directory = save(build("gpt_oss"), tmp_path / "oss")
    source = resolve_model(str(directory), load_format="dummy")
    whole = PagedRunner(load(source).model).step([(0, TOKENS)])
    for part in ThreadGroup(2).run(lambda tp: PagedRunner(load(source, tp=tp).model).step([(0, TOKENS)])):
        assert torch.allclose(part, whole, atol=1e-5)
