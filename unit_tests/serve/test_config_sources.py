from pathlib import Path

import pytest

from serve.config_sources import load_serve_config
from serve.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "varve.yaml"
    path.write_text("model: from-file\nport: 1\nmax-queue-size: 1\nhf_offline: true\n")
    return path


def test_the_command_line_wins_over_the_environment_over_the_file_over_the_default(file: Path) -> None:
    environment = {"VARVE_PORT": "2", "VARVE_MAX_QUEUE_SIZE": "2", "HOME": "/root", "VARVE_OF_ANOTHER_PROGRAM": "x"}
    config = load_serve_config({"port": "3"}, environment, file)
    assert (config.model, config.port, config.max_queue_size, config.tp) == ("from-file", 3, 2, 1)
    assert config.hf_offline


def test_the_environment_may_name_the_file(file: Path) -> None:
    assert load_serve_config({}, {"VARVE_CONFIG": str(file)}, None).model == "from-file"


def test_an_empty_file_says_nothing(file: Path) -> None:
    file.write_text("# nothing yet\n")
    assert load_serve_config({"model": "m"}, {}, file).port == 8000


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("modell: x", "unknown key 'modell' in FILE; did you mean model?"),
        ("7: x", "unknown key 7 in FILE"),
        ("- model", "FILE must map flags to values, it holds a list"),
        ("model: [", "FILE is not valid YAML"),
        ("model: m\nport: [1]", "port in FILE: input should be a valid integer, got '[1]'"),
        ("model: m\nport: null", "port in FILE: input should be a valid integer, got 'None'"),
        (
            "model: m\ncpu_cache_token_page_size: 100",
            "cpu_cache_token_page_size in FILE: input should be a multiple of 16",
        ),
        ("model: m\napi_key: ''", "api_key in FILE: string should have at least 1 character"),
        ("model: m\nmax-queue-size: -1", "max-queue-size in FILE: input should be greater than or equal to 0"),
    ],
)
def test_mistakes_in_the_file_are_one_line(file: Path, content: str, line: str) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_serve_config({}, {}, file)
    assert str(caught.value).startswith(line.replace("FILE", str(file)))
    assert "\n" not in str(caught.value)


def test_a_binary_file_is_one_line(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load_serve_config({}, {}, file)


def test_a_directory_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot read {tmp_path}: Is a directory"):
        load_serve_config({}, {}, tmp_path)


def test_a_mistake_in_the_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"VARVE_TP: input should be a valid integer.*got 'two'"):
        load_serve_config({"model": "m"}, {"VARVE_TP": "two"}, None)
