"""docs/cache.md says what the code does: sizes, flags, metrics."""

import re
from pathlib import Path

import pytest

from models.state_layout import derive_layout
from serve.config import ServeConfig
from serve.httpserver.cache_metrics import cache_families
from serve.httpserver.metrics import HttpMetrics, render
from serve.httpserver.router_metrics import router_families
from serve.multi_level_cache.control import statistics
from serve.multi_level_cache.disk_health import PAUSE_AFTER_ERROR_S
from serve.multi_level_cache.disk_tier import MAX_HUNG
from serve.router.admin import RouterAdmin
from unit_tests.models.builders import tiny_config
from unit_tests.serve.multi_level_cache.builders import Bench
from unit_tests.serve.multi_level_cache.test_disk_tier import Disk
from unit_tests.serve.router.router_fakes import Harness

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/cache.md").read_text()


@pytest.mark.parametrize(
    ("model", "layers", "heads", "dim"),
    [("SmolLM2-135M", 30, 3, 64), ("Llama-3.1-8B", 32, 8, 128), ("Qwen3-8B", 36, 8, 128)],
)
def test_sizes_are_those_of_the_layout(model: str, layers: int, heads: int, dim: int) -> None:
    config = tiny_config(num_layers=layers, num_kv_heads=heads, head_dim=dim)
    (row,) = [line for line in TEXT.splitlines() if line.startswith(f"| {model} | ")]
    small, large = (derive_layout(config, 64, dtype).groups[0].bytes_per_page for dtype in ("bfloat16", "float32"))
    cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
    assert cells == [
        f"{small // 64:,}",
        f"{small / 2**20:.2f} MiB",
        f"{2**30 // small * 64:,}",
        f"{2**30 // large * 64:,}",
    ]


def test_flags_exist_with_their_defaults() -> None:
    names = set(re.findall(r"`--(\w+)`", TEXT)) - {"base_url", "fix", "paired", "tp"}
    assert names <= set(ServeConfig.model_fields), names - set(ServeConfig.model_fields)


def test_metrics_exist(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    router, cache = RouterAdmin(Harness().router).statistics(), statistics(Bench().manager)
    cache["lower_tier"] = disk.tier.statistics()
    disk.tier.close(10)
    shown = render(HttpMetrics(), [*router_families(router), *cache_families(router, cache)]).decode()
    for name in re.findall(r"`(varve_(?:cache|router)_\w+)", TEXT):
        assert name in shown, name


def test_limits_are_those_of_the_code() -> None:
    assert f"nothing is stored for {PAUSE_AFTER_ERROR_S:.0f} s" in TEXT
    assert (MAX_HUNG, "two reads or writes hang for 30 s" in TEXT) == (2, True)
