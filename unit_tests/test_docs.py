"""What README and docs/ tell people to type or to look at exists."""

import contextlib
import re
from pathlib import Path

import pytest

from serve import cli
from serve.config import ServeConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HELP = {
    "varve": (),
    "varve serve": ("serve",),
    "varve pull": ("pull",),
    "varve bench serve": ("bench", "serve"),
    "varve bench static": ("bench", "static"),
    "varve bench cache": ("bench", "cache"),
    "varve bench profile": ("bench", "profile"),
    "varve cache ls": ("cache", "ls"),
    "varve cache check": ("cache", "check"),
    "varve cache flush": ("cache", "flush"),
    "varve cache validate": ("cache", "validate"),
}
NOT_OURS = re.compile(r"^\s*(curl|git|pip|python -m pip|nvidia-smi|nsys|perf|taskset|numactl|vllm|llama-\w+|docker)\b")
SCRIPTS = [path for path in (ROOT / "test").rglob("*.py") if "ArgumentParser" in path.read_text()]
BY_SCRIPTS = {flag for path in SCRIPTS for flag in re.findall(r'add_argument\("(--\w+)"', path.read_text())}
BY_OTHERS = {"--help", "--version", "--config"} | BY_SCRIPTS


def help_of(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    with contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
    return capsys.readouterr().out


@pytest.fixture
def flags(capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Every flag of every command, in snake case."""
    text = "\n".join(help_of(words, capsys) for words in HELP.values())
    found = {f"--{name.replace('-', '_')}" for name in re.findall(r"--([a-z][a-z0-9_-]*)", text)}
    return found | {f"--no_{name}" for name, info in ServeConfig.model_fields.items() if info.annotation is bool}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_flags_that_a_page_names_exist(page: Path, flags: set[str]):
    lines = [line for line in page.read_text().splitlines() if not NOT_OURS.match(line)]
    named = [name for line in lines for name in re.findall(r"(?<![\w-])--([a-z][a-z0-9_-]*)", line)]
    assert {f"--{name.replace('-', '_')}" for name in named} - flags - BY_OTHERS == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_that_a_page_names_exist(page: Path):
    text = page.read_text()
    for command in re.findall(r"\bvarve ([a-z]+)\b(?=[^\n]*`|[^\n]*#| [A-Z-])", text):
        assert command in cli.COMMANDS, command
    for benchmark in re.findall(r"\bvarve bench ([a-z]+)", text):
        assert benchmark in cli.BENCHMARKS, benchmark
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE):
        assert target in targets, target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_and_files_that_a_page_names_exist(page: Path):
    text = page.read_text()
    linked = [page.parent / target for target in re.findall(r"\]\((?!https?:)([^)#]+)", text)]
    named = [ROOT / path for path in re.findall(r"`((?:serve|models|kernels|docs|test|unit_tests)/[\w./]*)`", text)]
    named = [path for path in named if not path.stem.isupper()]  # `models/FAMILY.py` stands for any
    assert [str(path) for path in [*linked, *named] if not path.exists()] == []


def test_environment_names_that_pages_use_are_flags():
    known = {f"VARVE_{name.upper()}" for name in ServeConfig.model_fields} | {"VARVE_CACHE"}
    for page in PAGES:
        assert set(re.findall(r"\bVARVE_[A-Z_]+[A-Z]\b", page.read_text())) <= known, page.name


@pytest.mark.parametrize("command", HELP)
def test_help_explains_every_flag(command: str, capsys: pytest.CaptureFixture[str]):
    text = help_of(HELP[command], capsys)
    assert text.startswith(f"usage: {command}")
    if command == "varve serve":
        assert all(f"--{name}" in text for name in ServeConfig.model_fields if name != "model")
        assert all(info.description for info in ServeConfig.model_fields.values())


def test_the_readme_s_first_commands_are_what_the_makefile_runs():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    assert "make serve" in readme
    assert "make test" in readme
    assert re.search(r"^serve: install\n\t\$\(BIN\)/varve serve ", makefile, re.MULTILINE)
    assert re.search(r"^test: install\n\t.*pytest", makefile, re.MULTILINE)
