"""The engine's configuration: resolved once by the launcher, frozen, handed to every process.

Flags have LightLLM's names. Precedence: command line, then `VARVE_<FLAG>` environment variables, then the YAML file
of `--config`, then the defaults below.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ServeConfig(BaseModel):
    """Everything `varve serve` can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    model: str = Field(description="directory, GGUF file, hub name, or a packaged model such as smollm2-135m")
    served_model_name: str | None = Field(None, description="name in /v1/models; default: the last part of MODEL")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    api_key: str | None = Field(None, min_length=1, description="require 'Authorization: Bearer KEY' on /v1 routes")
    admin_api_key: str | None = Field(
        None, min_length=1, description="enable the admin routes and require this key on them"
    )
    http_max_body_size: int | None = Field(
        None, ge=1024, description="bytes of a request's body at most; default: 64 a token of context, at least 32 MiB"
    )
    num_http_servers: int = Field(1, ge=1, le=64, description="HTTP processes that share the port")
    tp: int = Field(1, ge=1, le=64, description="tensor-parallel workers")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    cpu_threads: int | None = Field(None, ge=1, description="threads of all workers together; default: usable cores")
    data_type: Literal["auto", "bfloat16", "float32"] = Field("auto", description="compute and cache dtype")
    disable_cuda_graph: bool = Field(False, description="launch each kernel of a decode step by itself (slower)")
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = Field(
        "auto", description="where weights come from; dummy: random weights of the config's shapes"
    )
    dummy_seed: int = Field(0, description="seed of --load_format dummy")
    hf_offline: bool = Field(False, description="never reach the hub; use its cache only")
    max_req_total_len: int | None = Field(None, ge=2, description="prompt + output limit; default: the model's context")
    running_max_req_size: int = Field(256, ge=1, le=4096, description="requests in the batch at most")
    max_queue_size: int = Field(1024, ge=0, description="requests waiting at most; beyond it HTTP answers 429")
    batch_max_tokens: int | None = Field(
        None, ge=1, description="tokens a step at most; default: 2048 on a CPU, 8192 on CUDA"
    )
    chunked_prefill_size: int | None = Field(
        None, ge=1, description="prompt tokens of one request a step at most; default: as many as a step may have"
    )
    cpu_cache_token_page_size: int = Field(
        64,
        ge=16,
        le=256,
        multiple_of=16,
        description="tokens a page, in every tier; a multiple of 16, raised to one of what the model's states need",
    )
    checkpoint_interval: int = Field(2048, ge=1, description="prompt tokens between kept states of recurrent layers")
    enable_cpu_cache: bool = Field(False, description="keep finished prompt pages in CPU memory too")
    cpu_cache_storage_size: float | None = Field(
        None, gt=0, description="GiB of CPU memory for pages; default: 2, with --enable_cpu_cache"
    )
    cpu_cache_sync: bool = Field(False, description="copy pages to and from CPU memory without overlap (slower)")
    cpu_cache_load_policy: Literal["auto", "always"] = Field(
        "auto", description="auto: load pages where that is predicted to be faster than recomputing; always: load them"
    )
    cpu_cache_store_output: bool = Field(False, description="also store pages of generated tokens in CPU memory")
    enable_disk_cache: bool = Field(False, description="keep prompt pages on disk too, over restarts")
    disk_cache_storage_size: float | None = Field(
        None, gt=0, description="GiB of disk for pages; default: 10, with --enable_disk_cache"
    )
    disk_cache_dir: Path | None = Field(
        None, description="directory of the disk cache, one server's at a time; default: ~/.cache/varve/pages"
    )
    disk_cache_policy: Literal["write_through", "after_hits"] | None = Field(
        None,
        description="write_through: every page that is in CPU memory goes to disk; after_hits: once another request "
        "has wanted it too; default: write_through, with --enable_disk_cache",
    )
    disk_cache_min_tokens: int = Field(
        0, ge=0, description="pages that only prompts of fewer tokens have do not go to disk"
    )
    fault_inject: str = Field(
        "", description="cache faults on purpose, for tests: SITE:ACTION[=SECONDS][:n=CALL|:p=RATE],..."
    )
    max_loading_fraction: float = Field(
        0.5, gt=0, le=1, description="share of a device pool that pages being loaded may take at most"
    )
    max_total_token_num: int | None = Field(None, ge=1, description="tokens in the device pool; default by memory")
    mem_fraction: float = Field(0.9, gt=0, le=1, description="share of the device's free memory for weights and pool")
    schedule_policy: Literal["fcfs", "priority"] = Field("fcfs", description="order of the queue")
    request_timeout: float = Field(3600.0, gt=0, description="seconds until a request is aborted")
    step_timeout: float = Field(300.0, gt=0, description="seconds a plan may take before the engine is restarted")
    start_timeout: float = Field(1800.0, gt=0, description="seconds until all processes must be ready")
    drain_timeout: float = Field(5.0, ge=0, description="seconds that running requests get to finish on SIGTERM")
    run_dir: Path | None = Field(
        None, description="directory for sockets, new or empty; default: a private temporary one"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe line logged")
    seed: int | None = Field(None, description="base of the seeds of requests that name none; default: random")


class ResolvedConfig(BaseModel):
    """`ServeConfig` with every default that needed the model or the machine filled in; what children receive."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    serve: ServeConfig
    model_path: Path
    model_name: str
    run_dir: Path
    device: Literal["cpu", "cuda"]
    data_type: Literal["bfloat16", "float32"]
    threads_per_worker: int
    max_req_total_len: int
    batch_max_tokens: int
    chunked_prefill_size: int
    page_size: int
    num_slots: int
    cpu_cache_bytes: int = 0  # of the host arena; 0: there is none
    disk_cache_bytes: int = 0  # of all segments; 0: there is no disk tier
    disk_cache_dir: Path | None = None
