"""From config and files to a model that can run."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from kernels.interface import KernelBackend
from models.config import ModelConfig
from models.errors import ModelError
from models.layers.decoder import DecoderModel
from models.loader.digest import BlockDigester
from models.loader.dummy import DummyReader
from models.loader.filling import WeightFilling
from models.loader.gguf import GgufReader
from models.loader.mxfp4 import Mxfp4Reader
from models.loader.safetensors import SafetensorsReader, keep_name
from models.loader.stacked_experts import StackedExpertsReader
from models.parallel import TensorParallel
from models.registry import load_family
from models.sharding import shard_model
from models.source import ModelSource, Progress
from models.weight_plan import WeightPlan, WeightReader, check_names

# Families whose checkpoints keep experts in forms of their own.
_WRAPPERS: dict[str, Callable[[SafetensorsReader], WeightReader]] = {
    "gpt_oss": Mxfp4Reader,
    "qwen3_next": StackedExpertsReader,
}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and this rank's share of the weights' digest.

    block_digests: 32 bytes by block index; `models.weights_digest.merge_block_digests` wants those of all ranks.
    Random weights have none: they follow from config and seed.
    """

    model: DecoderModel
    block_digests: dict[int, bytes]


def load_model(
    config: ModelConfig,
    source: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    tp: TensorParallel,
    backend: KernelBackend,
    progress: Progress | None = None,
    dummy_seed: int = 0,
    max_positions: int | None = None,
) -> LoadedModel:
    """Read this rank's part of `source` as `dtype` onto `device` and build the model on it.

    progress is called with ("weights" or "digest", bytes done, bytes in all). max_positions: rows of the rotation
    table; default the model's context. Raises ModelError with one line for whatever is wrong with the files.
    """
    family = load_family(config.family)
    sharding = shard_model(config, tp.size, tp.rank)
    plan = family.plan_weights(config, sharding)
    reader = _open_reader(config, source, plan, dummy_seed)
    check_names(plan, reader.shapes(), str(source.path))
    with _loading_pool() as pool:
        filling = WeightFilling(plan, reader, pool, lambda size: backend.allocate((size,), dtype, device))
        digester = BlockDigester(source.weight_files, tp.rank, tp.size, pool)
        weights = filling.result(progress)
        digests = digester.result(progress)
    positions = max_positions or config.max_position_embeddings
    model = family.build_model(config, weights, sharding, tp, backend, device=device, max_positions=positions)
    return LoadedModel(model, digests)


def _open_reader(config: ModelConfig, source: ModelSource, plan: WeightPlan, seed: int) -> WeightReader:
    if source.kind == "safetensors":
        ignore = frozenset({"lm_head.weight"}) if config.tie_word_embeddings else frozenset()
        family = load_family(config.family)
        rename = partial(family.checkpoint_name, config) if hasattr(family, "checkpoint_name") else keep_name
        stored = SafetensorsReader(source.weight_files, ignore=ignore, rename=rename)
        wrapper = _WRAPPERS.get(config.family)
        return stored if wrapper is None else wrapper(stored)
    if source.kind == "gguf":
        return GgufReader(source.path, config)
    if source.kind == "dummy":
        return DummyReader(plan, seed)
    raise ModelError(f"weights of kind {source.kind!r} are not supported")


@contextmanager
def _loading_pool() -> Iterator[ThreadPoolExecutor]:
    """As many threads as torch may use, each running torch operations alone.

    Threads of torch's own would wait for each other by spinning, which on a busy machine takes many times longer.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="load-weights")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(num_threads)
