"""What single families have in config.json beside the common fields."""

from collections.abc import Callable

from models.config import ModelConfig
from models.hf_deepseek import read_deepseek
from models.hf_deepseek_v4 import read_deepseek_v4
from models.hf_fields import HfFields
from models.hf_gemma3 import read_gemma3
from models.hf_gpt_oss import read_gpt_oss
from models.hf_lfm2 import read_lfm2
from models.hf_qwen3_next import read_qwen3_next

FAMILY_READERS: dict[str, Callable[[HfFields, ModelConfig], ModelConfig]] = {
    "deepseek": read_deepseek,
    "gemma3": read_gemma3,
    "gpt_oss": read_gpt_oss,
    "deepseek_v4": read_deepseek_v4,
    "lfm2": read_lfm2,
    "qwen3_next": read_qwen3_next,
}
