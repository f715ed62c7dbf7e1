import json
from pathlib import Path

import pytest

from serve.config import ResolvedConfig, ServeConfig
from serve.config_resolve import MachineShape, resolve
from serve.errors import LaunchError
from serve.launcher.model_facts import LoadedModel

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
}


def nothing(phase: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def load(directory: Path, **flags: object) -> tuple[LoadedModel, ResolvedConfig]:
    serve = ServeConfig(model=str(directory), load_format="dummy", **flags)
    model = LoadedModel.load(serve, nothing)
    return model, resolve(serve, model.shape, MachineShape("cpu", 2), Path("/tmp/r"))


def test_a_directory_gives_shape_groups_and_plain_data(directory: Path) -> None:
    model, config = load(directory)
    assert (model.shape.name, model.shape.context_length, model.shape.dtype) == ("tiny", 128, "float32")
    (group,) = model.groups(config)
    # 2 layers, k and v, 2 heads of 8 dimensions, 64 tokens, 4 bytes
    assert (group.name, group.kind, group.bytes_per_page) == ("full", "full", 2 * 2 * 2 * 8 * 64 * 4)
    described = json.loads(json.dumps(model.describe(config)))
    assert described["config"]["num_layers"] == 2
    assert described["source"]["kind"] == "dummy"
    assert described["layout"]["groups"][0]["kind"] == "full"


def test_the_namespace_tells_apart_what_pages_depend_on(directory: Path) -> None:
    names = set()
    for flags in ({}, {"dummy_seed": 1}, {"cpu_cache_token_page_size": 32}, {"data_type": "bfloat16"}):
        model, config = load(directory, **flags)
        names.add(model.namespace(config, {}))
        assert model.namespace(config, {}) == model.namespace(config, {})
    assert len(names) == 4
    assert all(len(name) == 32 for name in names)


def test_a_weight_block_that_no_rank_digested_is_an_error(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"weights")
    serve = ServeConfig(model=str(directory))
    model = LoadedModel.load(serve, nothing)
    config = resolve(serve, model.shape, MachineShape("cpu", 2), Path("/tmp/r"))
    first, other = (model.namespace(config, {0: bytes([content]) * 32}) for content in (1, 2))
    assert first != other
    with pytest.raises(LaunchError, match="could not be digested: 1 of 1 block digests are missing"):
        model.namespace(config, {})


def test_a_model_that_is_nowhere_is_one_line() -> None:
    with pytest.raises(LaunchError, match="'no-such-model' is not a directory"):
        LoadedModel.load(ServeConfig(model="no-such-model"), nothing)


@pytest.mark.parametrize(("tp", "fits"), [(2, True), (4, True), (5, False), (64, False)])
def test_more_ranks_than_heads_are_refused_before_anything_is_started(directory: Path, tp: int, fits: bool) -> None:
    if fits:
        load(directory, tp=tp)
        return
    with pytest.raises(LaunchError, match=f"--tp {tp} is too large for this model"):
        load(directory, tp=tp)
