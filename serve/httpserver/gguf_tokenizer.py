"""Builds a `tokenizers.Tokenizer` from a GGUF file's metadata.

`tokenizer.ggml.model` names the algorithm (gpt2: byte-level BPE; llama and gemma: SentencePiece BPE with byte
fallback; t5: unigram) and `tokenizer.ggml.pre` the rule that cuts text before BPE. The rules are those of llama.cpp
(`llama-vocab.cpp`); an unknown one is an error, because a wrong one gives other tokens without any sign of it.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from serve.httpserver.gguf_metadata import GGUFError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+CON|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*CON|"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL
_GPT4O = _CASED.replace("CON", _CONTRACTIONS + "?") + r"\p{N}{1,3}" + _CASED_TAIL
_TEKKEN = _CASED.replace("CON", "") + r"\p{N}" + _CASED_TAIL

# Byte-level kinds that split on a regular expression of their own.
_REGEX_KINDS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
}
# Byte-level kinds in which every digit stands alone before GPT-2's expression is applied.
_DIGIT_KINDS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}
_GPT2_KINDS = {"default", "gpt-2", "gpt2", "phi-2", "olmo", "jais", "mpt"}
_WHOLE_WORD_KINDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"}


class GGUFVocabulary:
    """The `tokenizer.ggml.*` part of a file's metadata, with llama.cpp's defaults."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata
        self.model = self.get("model", None)
        self.pre = self.get("pre", "default")
        self.tokens: list[str] = self.get("tokens", [])
        self.types: list[int] = self.get("token_type", [NORMAL] * len(self.tokens))
        self.scores: list[float] = self.get("scores", [])
        is_spm = self.model in ("llama", "gemma")
        self.add_bos: bool = self.get("add_bos_token", is_spm or self.pre in ("llama3", "llama-v3", "llama-bpe"))
        self.add_eos: bool = self.get("add_eos_token", self.model == "t5")
        self.add_space_prefix: bool = self.get("add_space_prefix", True)
        if not self.tokens:
            raise GGUFError("the file has no tokenizer.ggml.tokens")

    def get(self, key: str, default: Any) -> Any:
        """`tokenizer.ggml.KEY`, or the default."""
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def special_id(self, name: str) -> int | None:
        """Id of bos, eos, unknown, eot ...; None when the file has none."""
        found = self.get(f"{name}_token_id", None)
        return found if found is not None and 0 <= found < len(self.tokens) else None

    def special(self, name: str) -> str | None:
        """Text of bos, eos, unknown, eot ...; None when the file has none."""
        found = self.special_id(name)
        return None if found is None else self.tokens[found]

    def ids(self) -> dict[str, int]:
        """Token -> id."""
        return {token: index for index, token in enumerate(self.tokens)}


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file describes. Raises GGUFError for a kind that is not known."""
    vocabulary = GGUFVocabulary(metadata)
    builders = {"gpt2": _byte_level, "llama": _sentencepiece_bpe, "gemma": _sentencepiece_bpe, "t5": _unigram}
    if vocabulary.model not in builders:
        raise GGUFError(f"tokenizer.ggml.model {vocabulary.model!r} is not supported")
    tokenizer = builders[vocabulary.model](vocabulary)
    _add_tokens(tokenizer, vocabulary)
    _add_template(tokenizer, vocabulary)
    return tokenizer


def _byte_level(vocabulary: GGUFVocabulary) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.get("merges", [])]
    if not merges:
        raise GGUFError("a gpt2 tokenizer needs tokenizer.ggml.merges")
    whole_words = vocabulary.pre in _WHOLE_WORD_KINDS
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary.ids(), merges=merges, ignore_merges=whole_words))
    tokenizer.pre_tokenizer = byte_level_pre_tokenizer(vocabulary.pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_level_pre_tokenizer(kind: str) -> Any:
    """The rule named by `tokenizer.ggml.pre`."""
    if kind in _GPT2_KINDS:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in _DIGIT_KINDS:
        first = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    if kind in _REGEX_KINDS:
        split = pre_tokenizers.Split(Regex(_REGEX_KINDS[kind]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise GGUFError(f"tokenizer.ggml.pre {kind!r} is not supported")


def _sentencepiece_bpe(vocabulary: GGUFVocabulary) -> Tokenizer:
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise GGUFError("a SentencePiece tokenizer needs tokenizer.ggml.scores, one a token")
    unknown = vocabulary.special("unknown")
    model = models.BPE(
        vocab=vocabulary.ids(),
        merges=merges_from_scores(vocabulary.tokens, vocabulary.scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    _add_space_rules(tokenizer, vocabulary.add_space_prefix)
    return tokenizer


def _unigram(vocabulary: GGUFVocabulary) -> Tokenizer:
    pieces = list(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    byte_fallback = BYTE in vocabulary.types
    model = models.Unigram(pieces, unk_id=vocabulary.special_id("unknown"), byte_fallback=byte_fallback)
    tokenizer = Tokenizer(model)
    _add_space_rules(tokenizer, vocabulary.add_space_prefix)
    return tokenizer


def _add_space_rules(tokenizer: Tokenizer, add_space_prefix: bool) -> None:
    replace = normalizers.Replace(" ", SPACE)
    prepend = [normalizers.Prepend(SPACE)] if add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, replace])
    strip = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)


def merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """BPE merges that give what SentencePiece's scores give: by falling score, each from every pair of pieces."""
    rank = {token: index for index, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in rank and right in rank:
                found.append((-score, rank[left], rank[right], left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _add_tokens(tokenizer: Tokenizer, vocabulary: GGUFVocabulary) -> None:
    added = []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (CONTROL, UNKNOWN):
            added.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            # A piece of spaces is seen only after spaces have become the SentencePiece mark.
            added.append(AddedToken(token, special=False, normalized=SPACE in token))
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])


def _add_template(tokenizer: Tokenizer, vocabulary: GGUFVocabulary) -> None:
    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    before = [bos] if vocabulary.add_bos and bos is not None else []
    after = [eos] if vocabulary.add_eos and eos is not None else []
    if not before and not after:
        return
    ids = vocabulary.ids()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=[(token, ids[token]) for token in {*before, *after}]
    )
