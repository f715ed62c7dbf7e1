"""What `pyproject.toml` requires is what the packages import, and every requirement has a range."""

import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("serve", "models", "kernels")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return canonical(found[0])


def imported_distributions() -> set[str]:
    """Distributions that the packages import, anywhere in a module."""
    tops: set[str] = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                tops.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                tops.add((node.module or "").split(".")[0])
    by_import = metadata.packages_distributions()
    foreign = tops - set(sys.stdlib_module_names) - set(PACKAGES)
    return {canonical(by_import[top][0]) for top in foreign}


def test_every_distribution_that_is_imported_is_required_and_no_other():
    required = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    assert required == imported_distributions()


def test_every_requirement_has_a_range():
    requirements = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    assert [each for each in requirements if not re.search(r">=[^,;]+,<", each)] == []
