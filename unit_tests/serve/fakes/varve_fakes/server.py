"""`python -m varve_fakes.server [flags]`: a launcher with a model and children made for tests."""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.cli_parser import LineParser, add_config_flags, parse_line
from serve.config import ResolvedConfig, ServeConfig
from serve.config_resolve import ModelShape
from serve.config_sources import load_serve_config
from serve.errors import LaunchError
from serve.launcher.launch import Parts, launch
from serve.launcher.model_facts import GroupFacts, ModelFacts, Progress

ROLES = {
    "httpserver": "varve_fakes.role",
    "router": "varve_fakes.role",
    "worker": "varve_fakes.role",
    "cache": "serve.multi_level_cache.process",
}


@dataclass
class FakeModel:
    shape: ModelShape

    @classmethod
    def load(cls, serve: ServeConfig, progress: Progress) -> ModelFacts:
        if serve.served_model_name == "missing":
            raise LaunchError("model 'missing' is nowhere")
        if serve.served_model_name == "slow":
            print("fetching", flush=True)
            time.sleep(30)
        return cls(ModelShape(Path("/models/fake"), "fake", 4096, "float32"))

    def groups(self, config: ResolvedConfig) -> list[GroupFacts]:
        return [GroupFacts("full", "full", "all_pages", config.page_size, 0, 1000 * config.page_size)]

    def describe(self, config: ResolvedConfig) -> dict[str, Any]:
        return {"config": {"num_layers": 3}, "layout": {}, "source": {}}

    def namespace(self, config: ResolvedConfig, block_digests: Mapping[int, bytes]) -> bytes:
        return bytes([len(block_digests)]) * 32


def main() -> int:
    parser = LineParser("fake", "")
    names = add_config_flags(parser)
    options = vars(parse_line(parser, sys.argv[1:]))
    config = load_serve_config({name: options[name] for name in names if options[name]}, {}, None)
    roles = ROLES | ({"cache": "varve_fakes.role"} if os.environ.get("VARVE_FAKE_CACHE") else {})
    return launch(config, Parts(FakeModel.load, roles))


if __name__ == "__main__":
    sys.exit(main())
