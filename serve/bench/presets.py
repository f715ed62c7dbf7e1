"""The standard workloads, by name, as option values; a scenario file is the same in YAML."""

from collections.abc import Mapping
from pathlib import Path

import yaml

from serve.bench.flags import BenchError

PRESETS: Mapping[str, Mapping[str, object]] = {
    # One request: latency.
    "S1": {"num_requests": 1, "input_len": 512, "output_len": 128, "repeat": 3},
    # Small and larger batches, all at once: throughput.
    "S2": {"num_requests": 8, "input_len": 512, "output_len": 128, "repeat": 3},
    "S3": {"num_requests": 32, "input_len": 256, "output_len": 64, "repeat": 3},
    # The same long prompt twice: first token cold, then warm.
    "S4": {"num_requests": 1, "input_len": 1500, "output_len": 16, "passes": 2, "repeat": 3},
    # Conversations; histories before the turns are 800, 928, 1056 and 1184 tokens.
    "S5": {
        "workload": "multi_turn",
        "num_requests": 16,
        "num_turns": 4,
        "input_len": 800,
        "turn_input_len": 64,
        "output_len": 64,
        "repeat": 3,
    },
    # More prompts than the device pool holds, one after another, twice.
    "S6": {
        "num_requests": 40,
        "input_len": 1500,
        "output_len": 16,
        "passes": 2,
        "arrival": "closed_loop",
        "concurrency": 1,
        "repeat": 3,
    },
}


def preset_values(name: str) -> Mapping[str, object]:
    """Option values of a preset; BenchError names the known ones."""
    values = PRESETS.get(name.upper())
    if values is None:
        raise BenchError(f"--preset {name}: not one of {', '.join(PRESETS)}")
    return values


def scenario_values(path: Path) -> Mapping[str, object]:
    """Option values of a scenario file: a YAML (or JSON) mapping, where `preset` may name a base to start from."""
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise BenchError(f"--scenario {path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise BenchError(f"--scenario {path}: not a mapping of option names to values")
    base = values.pop("preset", None)
    return {**(preset_values(str(base)) if base is not None else {}), **values}
