"""The server's tokenizer: text to ids, ids to text, chat messages to a prompt. Neither torch nor transformers."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from models.packaged import cache_dir as model_cache_dir
from serve.httpserver.chat_template import ChatTemplate, ChatTemplateError
from serve.httpserver.detokenizer import Detokenizer
from serve.httpserver.gguf_metadata import GGUFError
from serve.httpserver.token_bytes import byte_characters, token_bytes_table
from serve.httpserver.tokenizer_cache import load_gguf_entry

TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TokenizerError(Exception):
    """No usable tokenizer; the message is one line for the user."""


class ServeTokenizer:
    """One model's tokenizer. Safe to call from several threads.

    special_tokens: by role (`bos_token` ...). eos_token_ids: they end a generation. vocab_size: ids are below it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_tokens: dict[str, str],
        eos_token_ids: list[int],
        chat_template: str | None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.special_tokens = special_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.chat_template = None if chat_template is None else ChatTemplate(chat_template, special_tokens)
        self.token_bytes, self.special_ids = token_bytes_table(tokenizer)
        self.vocab_size = len(self.token_bytes)
        bos = special_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else tokenizer.token_to_id(bos)
        self.max_token_chars = max((len(piece) for piece in self.token_bytes), default=1) or 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised. Releases the interpreter lock."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Text of ids, bytes that are not UTF-8 as U+FFFD, an incomplete last character dropped."""
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.feed(token_ids)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental detokenizer."""
        return Detokenizer(self.token_bytes, self.special_ids if skip_special_tokens else frozenset())

    def token_text(self, token_id: int) -> bytes:
        """The bytes that one token stands for; empty for ids without one."""
        return self.token_bytes[token_id] if 0 <= token_id < self.vocab_size else b""


def load_tokenizer(path: Path, cache_dir: Path | None = None, dummy: bool = False) -> ServeTokenizer:
    """The tokenizer of a model: a GGUF file, or a directory with tokenizer.json or a GGUF file.

    cache_dir: where a converted GGUF tokenizer is kept; default: beside the packaged models. dummy: a directory without
    any gets one token a byte. Raises TokenizerError.
    """
    kept = cache_dir or model_cache_dir() / "tokenizers"
    try:
        if path.is_file():
            return _from_gguf(path, kept)
        if (path / "tokenizer.json").is_file():
            return _from_directory(path)
        shards = sorted(path.glob("*.gguf"))
        if shards:
            return _from_gguf(shards[0], kept)
    except (OSError, GGUFError, ChatTemplateError, ValueError) as error:
        raise TokenizerError(f"cannot load the tokenizer of {path}: {error}") from error
    if dummy:
        return byte_tokenizer()
    raise TokenizerError(f"{path} has neither tokenizer.json nor a GGUF file")


def byte_tokenizer() -> ServeTokenizer:
    """One token a byte, ids 0 to 255: for dummy weights, which come without a tokenizer."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return ServeTokenizer(tokenizer, {}, [], None)


def _from_gguf(path: Path, cache_dir: Path) -> ServeTokenizer:
    entry = load_gguf_entry(path, cache_dir)
    roles = {"bos_token": entry.bos_token, "eos_token": entry.eos_token}
    special = {role: token for role, token in roles.items() if token is not None}
    return ServeTokenizer(Tokenizer.from_str(entry.tokenizer_json), special, entry.eos_token_ids, entry.chat_template)


def _from_directory(path: Path) -> ServeTokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
    config = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
    special = _special_tokens(config)
    ends = _eos_token_ids(path, tokenizer, special)
    return ServeTokenizer(tokenizer, special, ends, _chat_template(path, config))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for role in TOKEN_ROLES:
        token = config.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[role] = text
    return found


def _eos_token_ids(path: Path, tokenizer: Tokenizer, special: dict[str, str]) -> list[int]:
    named = _read_json(path / "generation_config.json").get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    if "eos_token" in special:
        ids = [*ids, tokenizer.token_to_id(special["eos_token"])]
    return [token_id for token_id in ids if isinstance(token_id, int)]


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    own_file = path / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    found = config.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found}
        found = named.get("default")
    return found if isinstance(found, str) else None
