"""What `varve bench cache` can be told."""

from enum import Enum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Setup(Enum):
    """Which tiers a server has: each setup adds one to that before it."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Numbers = Annotated[list[Annotated[int, Field(ge=1)]], BeforeValidator(_split), Field(min_length=1)]
Setups = Annotated[list[Setup], BeforeValidator(_split), Field(min_length=1)]


class CacheBenchOptions(BaseModel):
    """All options of one run; the flags are generated from the fields. Defaults take a few minutes on a laptop."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field("smollm2-135m", description="what to serve, as for varve serve")
    working_sets: Numbers = Field([3, 8, 20], description="numbers of distinct prefixes, separated by commas")
    setups: Setups = Field(
        list(Setup),
        description="tiers to compare, separated by commas: device, host (adds CPU memory), disk (adds disk)",
    )
    prefix_len: int = Field(512, ge=1, description="tokens a prefix")
    suffix_len: int = Field(32, ge=1, description="tokens that follow a prefix, new in every request")
    output_len: int = Field(4, ge=1, description="tokens to generate")
    rounds: int = Field(1, ge=1, description="how often each prefix is asked again, in random order, after the first")
    concurrency: int = Field(1, ge=1, description="requests in flight")
    device_tokens: int = Field(2560, ge=2, description="--max_total_token_num of the servers")
    cpu_cache_storage_size: float = Field(0.1, gt=0, description="GiB of CPU memory, with host and disk")
    disk_cache_storage_size: float = Field(0.5, gt=0, description="GiB of disk, with disk")
    disk_cache_dir: Path | None = Field(
        None, description="where to make the disk cache, on the disk to be measured; default: a temporary directory"
    )
    serve_flags: str = Field("", description="further flags of varve serve, in one argument")
    vocab_size: int = Field(32000, ge=2, description="prompts are random token ids below this")
    paired: bool = Field(
        False,
        description="measure instead what the CPU cache gains and costs: two servers in turns, with it and without "
        "(about six minutes; the sizes of working sets and prefixes are its own)",
    )
    paired_rounds: int = Field(2, ge=1, description="with --paired: turns of both servers")
    seed: int = Field(0, ge=0, description="makes prompts and their order repeatable")
    start_timeout: float = Field(600.0, gt=0, description="seconds until a server must be ready")
    timeout: float = Field(600.0, gt=0, description="seconds until a request counts as failed")
    json_file: Path | None = Field(None, alias="json", description="write all figures to this file")
    plot: Path | None = Field(None, description="write a PNG with hit rate by tier and TTFT over the working set")
