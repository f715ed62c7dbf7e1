from pathlib import Path
from typing import Any

import pytest

from serve.config import ResolvedConfig, ServeConfig
from serve.config_resolve import SPARE_SLOTS, MachineShape, ModelShape, resolve
from serve.errors import ConfigError

MODEL = ModelShape(Path("/models/m"), "m", 4096, "bfloat16")
CPU, CUDA = MachineShape("cpu", 8), MachineShape("cuda", 8)


def resolved(machine: MachineShape = CPU, model: ModelShape = MODEL, **flags: Any) -> ResolvedConfig:
    return resolve(ServeConfig(model="m", **flags), model, machine, Path("/tmp/r"))


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        (CPU, {}, {"device": "cpu", "data_type": "bfloat16", "batch_max_tokens": 2048, "chunked_prefill_size": 2048}),
        (CUDA, {}, {"device": "cuda", "data_type": "bfloat16", "batch_max_tokens": 8192}),
        (CUDA, {"device": "cpu"}, {"device": "cpu", "batch_max_tokens": 2048}),
        (CPU, {"data_type": "float32"}, {"data_type": "float32"}),
        (CPU, {"batch_max_tokens": 100}, {"batch_max_tokens": 100, "chunked_prefill_size": 100}),
        (CPU, {"chunked_prefill_size": 100}, {"batch_max_tokens": 2048, "chunked_prefill_size": 100}),
        (CPU, {"chunked_prefill_size": 5000}, {"batch_max_tokens": 5000, "chunked_prefill_size": 5000}),
        (CPU, {}, {"max_req_total_len": 4096, "page_size": 64, "model_name": "m"}),
        (CPU, {"max_req_total_len": 100, "served_model_name": "n"}, {"max_req_total_len": 100, "model_name": "n"}),
        (CPU, {"max_total_token_num": 1000}, {"max_req_total_len": 999}),
        (CPU, {"max_total_token_num": 10000}, {"max_req_total_len": 4096}),
        (CPU, {"max_total_token_num": 1001, "max_req_total_len": 1000}, {"max_req_total_len": 1000}),
        (CPU, {"tp": 3}, {"threads_per_worker": 2}),
        (CPU, {}, {"cpu_cache_bytes": 0, "disk_cache_bytes": 0, "disk_cache_dir": None}),
        (
            CPU,
            {"enable_cpu_cache": True, "enable_disk_cache": True, "disk_cache_dir": Path("/d")},
            {"disk_cache_bytes": 10 << 30, "disk_cache_dir": Path("/d")},
        ),
        (CPU, {"enable_cpu_cache": True}, {"cpu_cache_bytes": 2 << 30}),
        (CPU, {"enable_cpu_cache": True, "cpu_cache_storage_size": 0.5}, {"cpu_cache_bytes": 1 << 29}),
        (CPU, {"tp": 16}, {"threads_per_worker": 1}),
        (CPU, {"tp": 2, "cpu_threads": 6}, {"threads_per_worker": 3}),
        (CPU, {"running_max_req_size": 10, "max_queue_size": 5}, {"num_slots": 15 + SPARE_SLOTS}),
        (
            CPU,
            {"running_max_req_size": 10, "max_queue_size": 6, "num_http_servers": 8},
            {"num_slots": 8 * 8 + 8 * SPARE_SLOTS},
        ),
    ],
)
def test_defaults_depend_on_model_and_machine(
    machine: MachineShape, flags: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = resolved(machine, **flags)
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_float32_checkpoint_stays_float32() -> None:
    assert resolved(CUDA, ModelShape(Path("m"), "m", 10, "float32")).data_type == "float32"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            {"chunked_prefill_size": 20, "batch_max_tokens": 10},
            "--chunked_prefill_size 20 is above --batch_max_tokens 10",
        ),
        ({"cpu_cache_storage_size": 3}, "--cpu_cache_storage_size needs --enable_cpu_cache"),
        ({"disk_cache_storage_size": 3}, "--disk_cache_storage_size needs --enable_disk_cache"),
        ({"disk_cache_policy": "write_through"}, "--disk_cache_policy needs --enable_disk_cache"),
        ({"enable_cpu_cache": True, "disk_cache_min_tokens": 1}, "--disk_cache_min_tokens needs --enable_disk_cache"),
        (
            {"enable_disk_cache": True},
            "--enable_disk_cache needs --enable_cpu_cache: pages reach the disk through CPU memory",
        ),
        (
            {"fault_inject": "disk.read"},
            "--fault_inject: fault 'disk.read': '' is not one of delay, fail, drop, bitflip, hang",
        ),
        ({"cpu_cache_sync": True}, "--cpu_cache_sync needs --enable_cpu_cache"),
        ({"cpu_cache_store_output": True}, "--cpu_cache_store_output needs --enable_cpu_cache"),
        (
            {"max_total_token_num": 1000, "max_req_total_len": 1000},
            "--max_total_token_num 1000 cannot hold one request of --max_req_total_len 1000",
        ),
        ({"fault_inject": "host.copy_in:fail"}, "--fault_inject needs --enable_cpu_cache"),
        (
            {"enable_cpu_cache": True, "fault_inject": "host:fail"},
            "--fault_inject: fault 'host:fail': 'host' is not one",
        ),
        ({"device": "cuda"}, "--device cuda: there is no NVIDIA device here"),
        ({"max_req_total_len": 4097}, "--max_req_total_len 4097 is above the model's context of 4096 tokens"),
    ],
)
def test_values_that_cannot_go_together_are_refused(flags: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        resolved(**flags)


def test_a_page_holds_whole_rows_of_the_models_states() -> None:
    for asked, multiple, given in ((64, 128, 128), (256, 128, 256), (64, 48, 96), (64, 16, 64)):
        model = ModelShape(Path("m"), "m", 10, "float32", multiple)
        assert resolved(model=model, cpu_cache_token_page_size=asked).page_size == given


def test_what_children_receive_survives_the_wire() -> None:
    config = resolved(run_dir=Path("/tmp/r"), api_key="k")
    assert ResolvedConfig.model_validate_json(config.model_dump_json()) == config
