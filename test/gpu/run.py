"""All checks and figures that need a GPU, in one go: `python test/gpu/run.py OUTPUT_DIR`.

Each part runs in a process of its own with a deadline, so that one that hangs costs the others nothing. Writes a log a
part and `summary.json`, prints a table, and exits 1 if a part failed. Needs the project's packages and pytest.
"""

import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Part:
    """One command and how long it may take."""

    name: str
    command: list[str]
    deadline_s: float


def two_gpus() -> list[Part]:
    """Tensor parallelism over NCCL, where there are two GPUs."""
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU ")
    return [Part("same-text-tp2", [sys.executable, "test/gpu/same_text.py", "--tp", "2"], 150)] if found > 1 else []


def parts(output: Path) -> list[Part]:
    """Checks first: figures of wrong kernels are worth nothing."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers()]
    return [
        Part(
            "kernels", [*pytest, "unit_tests/kernels/test_cuda_backend.py", "unit_tests/kernels/test_checksum.py"], 150
        ),
        Part("gpu-tests", [*pytest, "-m", "gpu", "unit_tests/serve/model_infer", "unit_tests/serve/bench"], 100),
        Part("same-text", [sys.executable, "test/gpu/same_text.py", "--enable_cpu_cache"], 150),
        *two_gpus(),
        Part("cells", [sys.executable, "test/gpu/cells.py", str(output)], 150),
        Part("tiers", [sys.executable, "test/gpu/tiers.py", str(output)], 150),
    ]


def workers() -> list[str]:
    """Each test compiles kernels of its own: many at once, where pytest-xdist is there."""
    return ["-n", "12"] if importlib.util.find_spec("xdist") else []


def run(part: Part, output: Path) -> dict[str, object]:
    begin = time.monotonic()
    with (output / f"{part.name}.log").open("w") as log:
        try:
            code = subprocess.run(part.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=part.deadline_s)
            outcome = "passed" if code.returncode == 0 else f"failed with {code.returncode}"
        except subprocess.TimeoutExpired:
            outcome = f"not done within {part.deadline_s:g} s"
    return {"part": part.name, "outcome": outcome, "seconds": round(time.monotonic() - begin, 1)}


def main() -> int:
    output = Path(sys.argv[1] if len(sys.argv) > 1 else "gpu-results")
    output.mkdir(parents=True, exist_ok=True)
    results = []
    for part in parts(output):
        results.append(run(part, output))
        print(f"{part.name:12} {results[-1]['outcome']:28} {results[-1]['seconds']} s", flush=True)
        print("".join((output / f"{part.name}.log").read_text().splitlines(keepends=True)[-25:]), flush=True)
        (output / "summary.json").write_text(json.dumps(results, indent=1))
    return 0 if all(result["outcome"] == "passed" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
