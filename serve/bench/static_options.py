"""What `varve bench static` can be told."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from serve.bench.cells import Phase


def _split(value: object) -> object:
    """`1,8,32` as a list."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


Counts = Annotated[list[Annotated[int, Field(ge=1)]], BeforeValidator(_split), Field(min_length=1)]
Rates = Annotated[list[Annotated[float, Field(ge=0, le=1)]], BeforeValidator(_split), Field(min_length=1)]
Phases = Annotated[list[Phase], BeforeValidator(_split), Field(min_length=1)]


class StaticBenchOptions(BaseModel):
    """All options of one run; the flags are generated from the fields. Lists are given as `1,8,32`."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field("", description="directory, GGUF file, hub name, or a packaged model such as smollm2-135m")
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = Field(
        "auto", description="where weights come from; dummy: random weights of the config's shapes"
    )
    data_type: Literal["auto", "bfloat16", "float32"] = Field("auto", description="compute and cache dtype")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    disable_cuda_graph: bool = Field(False, description="launch each kernel of a decode step by itself (slower)")
    cpu_threads: int | None = Field(None, ge=1, description="threads on the CPU; default: usable cores")
    batch: Counts = Field([1, 8, 32], description="sequences")
    context: Counts = Field([512, 1024], description="tokens of each sequence")
    hit_rate: Rates = Field([0.0], description="prefill: share of each prompt that is in the prefix cache")
    phase: Phases = Field([Phase.PREFILL, Phase.DECODE], description="prefill, decode")
    decode_steps: int = Field(16, ge=1, description="decode steps timed in each repeat of a cell")
    repeat: int = Field(3, ge=1, description="repeats of each cell; medians are reported")
    batch_max_tokens: int = Field(2048, ge=1, description="tokens a step at most")
    page_size: int = Field(64, ge=16, le=256, description="tokens a page")
    json_file: Path | None = Field(None, alias="json", description="write all figures to this file")
    progress: bool = Field(True, description="show a progress bar on a terminal")
