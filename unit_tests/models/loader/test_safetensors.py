"""Safetensors checkpoints: sharded, damaged, incomplete."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.errors import ModelError
from models.weights_digest import file_blocks, merge_block_digests
from unit_tests.models.builders import PagedRunner, ThreadGroup, hf_model, load, save

TOKENS = [1, 5, 9, 200, 33, 47, 101, 8, 3, 77]


@pytest.fixture(scope="module")
def model():
    return hf_model("llama")


@pytest.fixture
def single(model, tmp_path):
    return save(model, tmp_path / "single")


def change(directory, edit):
    """Rewrite model.safetensors with `edit` applied to its dict of tensors."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


def logits(directory):
    return PagedRunner(load(directory).model).step([(0, TOKENS)])


def test_a_sharded_checkpoint_gives_the_same_logits(model, single, tmp_path):
    sharded = save(model, tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logits(sharded), logits(single))


def test_stray_files_beside_the_index_are_not_read(model, single, tmp_path):
    sharded = save(model, tmp_path / "sharded", max_shard_size="100KB")
    save_file({"consolidated": torch.zeros(2)}, sharded / "consolidated.safetensors")
    assert torch.equal(logits(sharded), logits(single))


def test_a_missing_shard_is_named(model, tmp_path):
    sharded = save(model, tmp_path / "sharded", max_shard_size="100KB")
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelError, match=f"weight files are missing: {victim.name}"):
        load(sharded)


def test_an_index_without_a_map_is_refused(single):
    (single / "model.safetensors.index.json").write_text(json.dumps({}))
    with pytest.raises(ModelError, match="'weight_map' is missing"):
        load(single)


@pytest.mark.parametrize("keep", [0, 4, 300, 0.5, 0.999])
def test_a_truncated_file_is_one_line(single, keep):
    path = single / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: (truncated or corrupt|is empty)") as caught:
        load(single)
    assert "\n" not in str(caught.value)


def test_missing_tensors_are_counted_and_the_first_ones_named(single):
    change(single, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1." in name])
    with pytest.raises(ModelError, match=r"9 tensors are missing: model\.layers\.1\..* and 6 more"):
        load(single)


def test_a_wrong_shape_is_named(single):
    change(single, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(ModelError, match=r"wrong shape: model\.norm\.weight is \[63\], not \[64\]"):
        load(single)


def test_a_tensor_that_the_model_does_not_know_is_named(single):
    change(single, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    with pytest.raises(ModelError, match=r"1 tensors are not part .*: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(single)


def test_harmless_tensors_are_ignored(single):
    before = logits(single)
    change(single, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert torch.equal(logits(single), before)


def test_a_tied_model_may_carry_its_head(tmp_path):
    tied = save(hf_model("llama", tie_word_embeddings=True), tmp_path / "tied")
    before = logits(tied)
    change(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    assert torch.equal(logits(tied), before)


def test_whole_numbers_are_refused(single):
    change(single, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has dtype I32"):
        load(single)


def test_a_tensor_in_two_files_is_refused(single):
    save_file({"model.norm.weight": torch.ones(64)}, single / "other.safetensors")
    (single / "model.safetensors").rename(single / "first.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is in another file too"):
        load(single)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_checkpoints_run_in_float32(model, tmp_path, dtype):
    import copy

    directory = save(copy.deepcopy(model).to(dtype), tmp_path / "half")
    assert load(directory).model.layers[0][0].qkv.dtype == torch.float32


def test_the_digest_is_of_the_content_and_not_of_the_ranks(single):
    def digest(size):
        parts = ThreadGroup(size).run(lambda tp: load(single, tp=tp))
        merged = {index: value for part in parts for index, value in part.block_digests.items()}
        return merge_block_digests(merged, len(file_blocks((single / "model.safetensors",))))

    before = digest(1)
    assert digest(2) == before
    change(single, lambda tensors: tensors["model.norm.weight"].add_(1e-3))
    assert digest(2) != before
