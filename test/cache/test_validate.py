"""`varve cache validate` over all tiers of a real server, for a model with recurrent states."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from real_server import ROOT
from state_models import StateModel


@pytest.mark.slow
def test_a_model_with_recurrent_states(tmp_path: Path):
    model = StateModel(tmp_path, "qwen3_next")
    words = ["cache", "validate", str(model.path), "--json", "--cpu_cache_token_page_size", "16"]
    done = subprocess.run(
        [sys.executable, "-m", "serve.cli", *words], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert [tier["tier"] for tier in found["tiers"]] == ["none", "device", "host", "disk"]
    assert all(tier["cached"] == tier["wanted"] for tier in found["tiers"])
    assert {leaf["kind"] for leaf in found["states"][0]["leaves"]} == {"full", "bounded"}
