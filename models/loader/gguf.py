"""GGUF checkpoints: names translated, query and key rows put back in order, blocks made into floats part by part."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from gguf.constants import GGML_QUANT_SIZES

from models.config import ModelConfig
from models.gguf_file import GgufFile, GgufTensor
from models.loader.dequantize import dequantize_rows
from models.weight_plan import Piece, WeightReader

_CHUNK_ELEMENTS = 1 << 19
_IGNORED = ("rope_freqs.weight",)  # part of the config
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_SANDWICH_NAMES = {  # where norms stand before and behind each half of a layer
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERT_NAMES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class _Stored:
    """Where a named tensor is: a GGUF tensor, or one expert's part of it; permuted_heads if its rows are permuted."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    expert: int
    permuted_heads: int


class GgufReader(WeightReader):
    """Reads the GGUF file at `path`, whose config is `config`."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._file = GgufFile(path)
        self._permuted = self._file.fields.get("general.architecture") == "llama"
        self._config = config
        self._layer_names = {**_LAYER_NAMES, **(_SANDWICH_NAMES if config.family == "gemma3" else {})}
        self._stored: dict[str, _Stored] = {}
        for tensor in self._file.tensors.values():
            if tensor.name not in _IGNORED:
                self._stored.update(self._translate(tensor))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._stored.items()}

    def read(self, piece: Piece, out: torch.Tensor) -> None:
        stored = self._stored[piece.name]
        rows = self._raw_rows(stored)
        if len(piece.shape) == 1:
            out.copy_(dequantize_rows(rows, stored.tensor.quant)[0, self._row_indexes(stored, piece)])
            return
        columns = (0, piece.shape[1])
        if piece.dim == 0:
            indexes = self._row_indexes(stored, piece)
            rows = rows[indexes]
        else:
            columns = (piece.start, piece.stop)
        _dequantize_into(rows, stored.tensor, columns, out)

    def _translate(self, tensor: GgufTensor) -> dict[str, _Stored]:
        match = _LAYER.fullmatch(tensor.name)
        if match is None:
            return {_TOP_NAMES.get(tensor.name, tensor.name): _Stored(tensor, tensor.shape, 0, 0)}
        layer, part, kind = match.groups()
        if part in _EXPERT_NAMES and kind == "weight":
            prefix = f"model.layers.{layer}.mlp.experts"
            return {
                f"{prefix}.{expert}.{_EXPERT_NAMES[part]}.weight": _Stored(tensor, tensor.shape[1:], expert, 0)
                for expert in range(tensor.shape[0])
            }
        heads = {"attn_q": self._config.num_q_heads, "attn_k": self._config.num_kv_heads}.get(part, 0)
        known = self._layer_names.get(part)
        name = tensor.name if known is None else f"model.layers.{layer}.{known}.{kind}"
        return {name: _Stored(tensor, tensor.shape, 0, heads if self._permuted else 0)}

    def _raw_rows(self, stored: _Stored) -> torch.Tensor:
        """uint8 [rows, bytes a row] of one matrix (a vector is one row), still in the file."""
        data = torch.frombuffer(self._file.bytes_of(stored.tensor), dtype=torch.uint8)
        if len(stored.tensor.shape) == 3:
            data = data.view(stored.tensor.shape[0], -1)[stored.expert]
        return data.view(1 if len(stored.shape) == 1 else stored.shape[0], -1)

    def _row_indexes(self, stored: _Stored, piece: Piece) -> slice | torch.Tensor:
        """Which stored rows are rows [start, stop) of the checkpoint.

        llama.cpp's converter reorders each head's rows of q and k from half-split to interleaved rotation.
        """
        if not stored.permuted_heads:
            return slice(piece.start, piece.stop)
        order = torch.arange(stored.shape[0]).view(stored.permuted_heads, -1, 2).transpose(1, 2).reshape(-1)
        return order[piece.start : piece.stop]


def _dequantize_into(rows: torch.Tensor, tensor: GgufTensor, columns: tuple[int, int], out: torch.Tensor) -> None:
    """Write columns [start, stop) of raw `rows` into out [rows, stop - start], some rows at a time."""
    block, block_bytes = GGML_QUANT_SIZES[tensor.quant]
    start, stop = columns
    first = start // block
    rows = rows[:, first * block_bytes : -(-stop // block) * block_bytes]
    skip, width = start - first * block, stop - start
    step = max(1, _CHUNK_ELEMENTS // max(width, 1))
    for row in range(0, rows.shape[0], step):
        values = dequantize_rows(rows[row : row + step], tensor.quant)
        out[row : row + step].copy_(values[:, skip : skip + width])
