"""Rotary embeddings as transformers describes them (versions 4 and 5)."""

from typing import Any

from models.config import RopeConfig
from models.errors import ModelError
from models.hf_fields import HfFields

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def read_rope(fields: HfFields, head_dim: int) -> RopeConfig:
    """`rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta` (4)."""
    data: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        found = fields.get(name) or {}
        if not isinstance(found, dict):
            raise ModelError(f"{fields.where}: field '{name}' must be an object, not {found!r}")
        data.update(found)
    rope = HfFields(data, fields.where)
    kind = rope.get("rope_type", "type") or "default"
    if kind not in _ROPE_TYPES:
        raise ModelError(f"{fields.where}: rope type {kind!r} is not supported ({', '.join(_ROPE_TYPES)} are)")
    theta = rope.number("rope_theta", default=fields.number("rope_theta", default=10000.0, kind=float), kind=float)
    partial = fields.number("partial_rotary_factor", default=1.0, kind=float)
    partial = rope.number("partial_rotary_factor", default=partial, kind=float)
    common = {"rope_type": kind, "theta": theta, "rotary_dim": int(head_dim * partial)}
    if kind == "default":
        return RopeConfig(**common)
    context = fields.number("max_position_embeddings")
    original = fields.number("original_max_position_embeddings", default=context)
    original = rope.number("original_max_position_embeddings", default=original)
    default_factor = context / max(original, 1) if kind == "yarn" else None
    common["factor"] = rope.number("factor", default=default_factor, kind=float)
    if kind == "linear":
        return RopeConfig(**common)
    common["original_context"] = original
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            common[name] = rope.number(name, kind=float)
        return RopeConfig(**common)
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        common[name] = rope.number(name, default=default, kind=float)
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if rope.get(name) is not None:
            common[name] = rope.number(name, kind=float)
    return RopeConfig(**common, truncate=rope.get("truncate") is not False)
