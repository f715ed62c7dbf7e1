"""The layers of the tree: who may import whom, read from the source of every module."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("serve", "models", "kernels")
TORCH_FREE = ("serve/httpserver", "serve/router", "serve/multi_level_cache", "serve/ipc", "serve/launcher", "serve/cli")
MODULES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported_names(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def top_levels(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_names(path)}


def test_there_are_modules_to_check():
    assert len(MODULES) > 20


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_stays_in_its_layer(path: Path):
    package, tops = path.parts[0], top_levels(path)
    if package == "kernels":
        assert not tops & {"serve", "models"}, "kernels import neither serve nor models"
    if package == "models":
        assert "serve" not in tops, "models never import serve"
    if path.as_posix().startswith(TORCH_FREE):
        assert not tops & {"torch", "transformers", "triton", "numba"}, "this process never imports torch"
    if not path.as_posix().startswith("serve/ipc"):
        assert not tops & {"zmq", "rpyc"}, "only serve/ipc speaks zmq and rpyc"
    if not path.as_posix().startswith(("serve/ipc", "kernels/cpu")):
        assert "ctypes" not in tops, "only serve/ipc calls the C library, and kernels/cpu what it compiled"


@pytest.mark.parametrize("name", ["serve.ipc.messages", "serve.cli", "models.config", "models.state_layout"])
def test_light_modules_do_not_pull_torch_in(name: str):
    import subprocess
    import sys

    code = f"import sys, {name}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_transformers_does_not_take_our_kernels_for_the_package_of_that_name():
    """transformers has an optional dependency also called `kernels`; it must not find ours."""
    from transformers.utils import import_utils

    probe = getattr(import_utils, "is_kernels_available", None)
    assert probe is None or not probe()
