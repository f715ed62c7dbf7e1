"""From `ServeConfig` to `ResolvedConfig`: every default that needs the model or the machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from serve.config import ResolvedConfig, ServeConfig
from serve.errors import ConfigError
from serve.multi_level_cache.fault_injector import FaultSpecError, parse_faults

CPU_BATCH_TOKENS = 2048
CUDA_BATCH_TOKENS = 8192
# A request's row computes this many tokens ahead of the last result; the pool must have room for them.
TOKENS_AHEAD = 1
DEFAULT_CPU_CACHE_GIB = 2.0
DEFAULT_DISK_CACHE_GIB = 10.0
DEFAULT_DISK_CACHE_DIR = Path("~/.cache/varve/pages")
# Slots that an HTTP process has beyond what may run and wait, for requests that have ended but still drain.
SPARE_SLOTS = 16
# Connections spread unevenly over HTTP processes: each can take this many times its even share of requests.
SHARE_FACTOR = 4


@dataclass(frozen=True)
class ModelShape:
    """What the defaults depend on. context_length: tokens; dtype: the checkpoint's; page_multiple: tokens that a page
    must be a multiple of."""

    path: Path
    name: str
    context_length: int
    dtype: str
    page_multiple: int = 1


@dataclass(frozen=True)
class MachineShape:
    """device: what `auto` means here; cores: that this process may use."""

    device: Literal["cpu", "cuda"]
    cores: int


def resolve(serve: ServeConfig, model: ModelShape, machine: MachineShape, run_dir: Path) -> ResolvedConfig:
    """Fill every default in. Raises ConfigError for values that the model or each other make impossible."""
    device = machine.device if serve.device == "auto" else serve.device
    if device == "cuda" and machine.device != "cuda":
        raise ConfigError("--device cuda: there is no NVIDIA device here that the installed torch can use")
    batch_max_tokens, chunked_prefill_size = resolve_token_budgets(serve, device)
    return ResolvedConfig(
        serve=serve,
        model_path=model.path,
        model_name=serve.served_model_name or model.name,
        run_dir=run_dir,
        device=device,
        data_type=resolve_data_type(serve, model.dtype),
        threads_per_worker=max(1, (serve.cpu_threads or machine.cores) // serve.tp),
        max_req_total_len=resolve_length_limit(serve, model.context_length),
        batch_max_tokens=batch_max_tokens,
        chunked_prefill_size=chunked_prefill_size,
        page_size=-(-serve.cpu_cache_token_page_size // model.page_multiple) * model.page_multiple,
        num_slots=count_slots(serve),
        cpu_cache_bytes=resolve_cpu_cache(serve),
        disk_cache_bytes=resolve_disk_cache(serve),
        disk_cache_dir=resolve_disk_directory(serve),
    )


def resolve_token_budgets(serve: ServeConfig, device: str) -> tuple[int, int]:
    """Tokens a step, and prompt tokens a request a step; a lone chunk size may raise the default step."""
    default = CUDA_BATCH_TOKENS if device == "cuda" else CPU_BATCH_TOKENS
    batch = serve.batch_max_tokens or max(default, serve.chunked_prefill_size or 0)
    chunk = serve.chunked_prefill_size or batch
    if chunk > batch:
        raise ConfigError(f"--chunked_prefill_size {chunk} is above --batch_max_tokens {batch}")
    return batch, chunk


def resolve_data_type(serve: ServeConfig, model_dtype: str) -> Literal["bfloat16", "float32"]:
    """auto: float32 for a float32 checkpoint, else bfloat16, whatever the device."""
    if serve.data_type != "auto":
        return serve.data_type
    return "float32" if model_dtype == "float32" else "bfloat16"


def resolve_length_limit(serve: ServeConfig, context_length: int) -> int:
    """Prompt and output tokens of one request: at most the context, and what a pool of a given size can hold."""
    pool = None if serve.max_total_token_num is None else serve.max_total_token_num - TOKENS_AHEAD
    if serve.max_req_total_len is None:
        return context_length if pool is None else max(1, min(context_length, pool))
    if serve.max_req_total_len > context_length:
        raise ConfigError(
            f"--max_req_total_len {serve.max_req_total_len} is above the model's context of {context_length} tokens"
        )
    if pool is not None and serve.max_req_total_len > pool:
        raise ConfigError(
            f"--max_total_token_num {serve.max_total_token_num} cannot hold one request of "
            f"--max_req_total_len {serve.max_req_total_len}"
        )
    return serve.max_req_total_len


def resolve_cpu_cache(serve: ServeConfig) -> int:
    """Bytes of the host arena, 0 without one. Raises ConfigError for options of a cache that is off."""
    check_faults(serve)
    if serve.enable_cpu_cache:
        return int((serve.cpu_cache_storage_size or DEFAULT_CPU_CACHE_GIB) * 2**30)
    for option in ("cpu_cache_storage_size", "cpu_cache_sync", "cpu_cache_store_output", "fault_inject"):
        if getattr(serve, option):
            raise ConfigError(f"--{option} needs --enable_cpu_cache")
    return 0


def resolve_disk_cache(serve: ServeConfig) -> int:
    """Bytes of the disk tier, 0 without one. Raises ConfigError for options of a cache that is off."""
    if serve.enable_disk_cache:
        if not serve.enable_cpu_cache:
            raise ConfigError("--enable_disk_cache needs --enable_cpu_cache: pages reach the disk through CPU memory")
        return int((serve.disk_cache_storage_size or DEFAULT_DISK_CACHE_GIB) * 2**30)
    for option in ("disk_cache_storage_size", "disk_cache_dir", "disk_cache_policy", "disk_cache_min_tokens"):
        if getattr(serve, option):
            raise ConfigError(f"--{option} needs --enable_disk_cache")
    return 0


def resolve_disk_directory(serve: ServeConfig) -> Path | None:
    """Where the disk tier lives; None without one."""
    if not serve.enable_disk_cache:
        return None
    return (serve.disk_cache_dir or DEFAULT_DISK_CACHE_DIR).expanduser()


def check_faults(serve: ServeConfig) -> None:
    """Raises ConfigError for faults that cannot be injected."""
    try:
        parse_faults(serve.fault_inject)
    except FaultSpecError as error:
        raise ConfigError(f"--fault_inject: {error}") from error


def count_slots(serve: ServeConfig) -> int:
    """Slots of the request table, the same number for each HTTP process. Unused slots cost no memory."""
    wanted = serve.running_max_req_size + serve.max_queue_size
    share = min(wanted, -(-SHARE_FACTOR * wanted // serve.num_http_servers)) + SPARE_SLOTS
    return share * serve.num_http_servers
