"""What the launcher knows of the model, through the torch-free part of `models`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from models import state_layout
from models.config import ModelConfig, load_model_config
from models.errors import ModelError
from models.sharding import shard_model
from models.source import ModelSource, resolve_model
from models.state_layout import StateLayout
from models.weights_digest import file_blocks, merge_block_digests
from serve.config import ResolvedConfig, ServeConfig
from serve.config_resolve import ModelShape
from serve.errors import LaunchError

NAMESPACE_BYTES = 32

Progress = Callable[[str, int, int], None]
"""Called with a phase, what is done, and the total."""


@dataclass(frozen=True)
class GroupFacts:
    """One state group as plain numbers. page_tokens: of one object; bytes_per_page: over all layers and heads."""

    name: str
    kind: str
    hit_policy: str
    page_tokens: int
    window_tokens: int
    bytes_per_page: int


class ModelFacts(Protocol):
    """A resolved model; tests have their own."""

    @property
    def shape(self) -> ModelShape: ...

    def groups(self, config: ResolvedConfig) -> list[GroupFacts]:
        """State groups at the configured page size and dtype."""

    def describe(self, config: ResolvedConfig) -> dict[str, Any]:
        """Plain data for children: `config`, `layout` and `source`."""

    def namespace(self, config: ResolvedConfig, block_digests: Mapping[int, bytes]) -> bytes:
        """32 bytes for all that a page's content depends on besides its tokens. Raises LaunchError."""


class LoadedModel:
    """`ModelFacts` of a model on this machine."""

    def __init__(self, source: ModelSource, config: ModelConfig) -> None:
        self._source = source
        self._config = config
        multiple = state_layout.page_multiple(config)
        self.shape = ModelShape(source.path, source.name, config.max_position_embeddings, config.dtype, multiple)

    @classmethod
    def load(cls, serve: ServeConfig, progress: Progress) -> "LoadedModel":
        """Find, and if need be fetch, what `serve.model` names. Raises LaunchError."""
        try:
            source = resolve_model(serve.model, serve.load_format, serve.hf_offline, progress)
            config = load_model_config(source)
            for rank in range(serve.tp):
                shard_model(config, serve.tp, rank)
            return cls(source, config)
        except ModelError as error:
            raise LaunchError(str(error)) from error

    def _layout(self, config: ResolvedConfig) -> StateLayout:
        return state_layout.derive_layout(self._config, config.page_size, config.data_type)

    def groups(self, config: ResolvedConfig) -> list[GroupFacts]:
        return [
            GroupFacts(
                name=group.name,
                kind=group.kind.value,
                hit_policy=group.hit_policy.value,
                page_tokens=group.page_tokens,
                window_tokens=group.window_tokens,
                bytes_per_page=group.bytes_per_page,
            )
            for group in self._layout(config).groups
        ]

    def describe(self, config: ResolvedConfig) -> dict[str, Any]:
        plain: dict[str, Any] = {
            "config": self._config.to_dict(),
            "layout": msgspec.to_builtins(self._layout(config)),
            "source": msgspec.to_builtins(self._source, enc_hook=str),
        }
        return plain

    def namespace(self, config: ResolvedConfig, block_digests: Mapping[int, bytes]) -> bytes:
        layout = self._layout(config)
        facts = state_layout.namespace(
            layout, self._config, self._weights_digest(config, block_digests), config.data_type
        )
        return blake2b(facts, digest_size=NAMESPACE_BYTES).digest()

    def _weights_digest(self, config: ResolvedConfig, block_digests: Mapping[int, bytes]) -> bytes:
        if self._source.kind == "dummy":
            return blake2b(f"dummy:{config.serve.dummy_seed}".encode(), digest_size=NAMESPACE_BYTES).digest()
        try:
            return merge_block_digests(dict(block_digests), len(file_blocks(self._source.weight_files)))
        except (ValueError, OSError) as error:
            raise LaunchError(f"the weights of {self._source.name} could not be digested: {error}") from error
