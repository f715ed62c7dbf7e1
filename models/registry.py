"""Which module implements which architecture; modules are imported when first needed, since they need torch."""

import importlib
from types import ModuleType

from models.errors import ModelError

_FAMILIES = {
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "Lfm2ForCausalLM": "lfm2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GptOssForCausalLM": "gpt_oss",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_next",
    "Qwen3_5ForConditionalGeneration": "qwen3_next",
    "Qwen3_5MoeForCausalLM": "qwen3_next",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_next",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


def known_architectures() -> list[str]:
    """Every architecture name that can be served."""
    return sorted(_FAMILIES)


def family_of(architecture: str) -> str:
    """The family module's name; ModelError lists the known architectures if this is not one."""
    if architecture not in _FAMILIES:
        known = ", ".join(known_architectures())
        raise ModelError(f"architecture {architecture!r} is not supported (known: {known})")
    return _FAMILIES[architecture]


def load_family(family: str) -> ModuleType:
    """Import the module of `family` (imports torch); it has `build_model` and `plan_weights`.

    It may have `checkpoint_name(config, name)`: a stored tensor's name in the plan, None for one that is not used.
    """
    return importlib.import_module(f"models.{family}")
