"""`varve cache validate MODEL`: the checks, and the table of what they found."""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from models.config import ModelConfig, load_model_config
from models.errors import ModelError
from models.source import ModelSource, resolve_model
from models.state_layout import StateLayout, derive_layout, page_multiple
from serve.cache_tables import format_columns
from serve.config import ServeConfig
from serve.config_resolve import ModelShape, resolve_data_type
from serve.errors import LaunchError
from serve.units import format_bytes
from serve.validate.sequences import StateEngine
from serve.validate.states import NUM_CONTINUED, StateReport, check_states, unnoticed
from serve.validate.tiers import TierCheck, TierPlan, check_tiers

_SEQUENCES = 4
_GIB = 2**30


def run(options: argparse.Namespace) -> int:
    """Run the checks and print a table by state; 1 when one fails. Raises LaunchError and ConfigError."""
    try:
        source = resolve_model(options.model, options.load_format)
        config = load_model_config(source)
        multiple = page_multiple(config)
        page_size = -(-options.cpu_cache_token_page_size // multiple) * multiple
        serve = ServeConfig(model=options.model, data_type=options.data_type)
        shape = ModelShape(source.path, source.name, config.max_position_embeddings, config.dtype)
        data_type = resolve_data_type(serve, shape.dtype)
        layout = derive_layout(config, page_size, data_type)
        reports = _states(config, source, data_type, page_size, _device(options.device))
    except (ModelError, ValueError, NotImplementedError) as error:
        raise LaunchError(str(error)) from error
    tiers = [] if options.states_only else _tiers(options, config, layout, data_type)
    problems = [line for report in reports for line in report.problems]
    problems += unnoticed(reports) + _tier_problems(tiers)
    if options.json:
        data: dict[str, Any] = {"states": [asdict(report) for report in reports]}
        print(json.dumps({**data, "tiers": [asdict(tier) for tier in tiers], "problems": problems}, indent=1))
    else:
        print(format_report(layout, reports, tiers, problems))
    return 1 if problems else 0


def _device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    return torch.device("cuda" if name == "cuda" or (name == "auto" and has_cuda) else "cpu")


def boundaries(config: ModelConfig, page_size: int) -> list[int]:
    """The first page boundary, and one behind a whole window, and all entries that an indexer may choose, if there are
    such; within the model's context."""
    compression = config.compression
    chosen = compression.index_top_k * compression.ratio if compression is not None else 0
    far = (-(-(max(config.window, chosen) + 1) // page_size) + 2) * page_size
    most = (config.max_position_embeddings - NUM_CONTINUED) // page_size * page_size
    if most < page_size:
        raise ValueError(f"a context of {config.max_position_embeddings} tokens is too short for {page_size} a page")
    return sorted({page_size, min(far, most)})


def _states(
    config: ModelConfig, source: ModelSource, data_type: str, page_size: int, device: torch.device
) -> list[StateReport]:
    wanted = boundaries(config, page_size)
    num_tokens = wanted[-1] + NUM_CONTINUED
    engine = StateEngine(config, source, data_type, page_size, device, num_tokens, _SEQUENCES)
    return [check_states(engine, data_type, boundary) for boundary in wanted]


def _tiers(options: argparse.Namespace, config: ModelConfig, layout: StateLayout, data_type: str) -> list[TierCheck]:
    page = layout.page_size
    far = boundaries(config, page)[-1]
    lengths = [page, page + 1, far + page // 2, far + 1]
    object_bytes = sum(group.bytes_per_page for group in layout.groups)
    gib = max(0.125, 4 * object_bytes * sum(-(-length // page) for length in lengths) / _GIB)
    plan = TierPlan(
        model=options.model,
        data_type=data_type,
        device=options.device,
        page_size=page,
        vocab_size=config.vocab_size,
        lengths=lengths,
        gib=gib,
        load_format=options.load_format,
    )
    with tempfile.TemporaryDirectory(prefix="varve-validate-") as directory:
        return check_tiers(plan, Path(directory))


def _tier_problems(tiers: list[TierCheck]) -> list[str]:
    found = []
    for tier in tiers:
        if tier.cached != tier.wanted:
            found.append(f"{tier.tier}: {tier.cached} tokens were cached, not {tier.wanted}")
        if tier.num_other_texts:
            found.append(
                f"{tier.tier}: {tier.num_other_texts} of {tier.num_prompts} hits gave another text than a miss"
            )
    return found


def format_report(layout: StateLayout, reports: list[StateReport], tiers: list[TierCheck], problems: list[str]) -> str:
    """Tables by state, by boundary and by tier, and what is wrong."""
    rows = [["state", "kind", "dtype", f"bytes a page of {layout.page_size}", "logits without it"]]
    for index, first in enumerate(reports[0].leaves):
        leaves = [report.leaves[index] for report in reports]
        lost = max(leaf.lost for leaf in leaves)
        effect = f"differ by {lost:.0e}" if any(leaf.is_noticed for leaf in leaves) else "THE SAME"
        names = [f"{first.group}.{first.leaf}", first.kind, first.dtype, format_bytes(first.object_bytes)]
        rows.append([*names, effect])
    lines = [format_columns(rows), ""]
    rows = [["boundary", "restored", "against a miss"]]
    for report in reports:
        restored = "equal" if report.restored == 0 else f"differs by {report.restored:.0e}"
        missed = "equal" if report.missed == 0 else f"differs by {report.missed:.0e}"
        marks = ["" if report.is_restored else " WRONG", "" if report.is_hit_equal else " WRONG"]
        rows.append([str(report.boundary), restored + marks[0], missed + marks[1]])
    lines.append(format_columns(rows))
    if tiers:
        rows = [["tier", "prompts", "cached tokens", "texts"]]
        for tier in tiers:
            text = "equal" if not tier.num_other_texts else f"{tier.num_other_texts} OTHERS"
            rows.append([tier.tier, str(tier.num_prompts), f"{tier.cached} of {tier.wanted}", text])
        lines += ["", format_columns(rows)]
    return "\n".join([*lines, "", *(problems or ["all is well"])])
