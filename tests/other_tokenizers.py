"""Small tokenizers of the usual kinds, and a draft worker's sight of a target with another one than its own."""

from __future__ import annotations

import json
from functools import cache

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from draft_service.tokenizer import DraftTokenizer, SharedVocabulary

TEXTS = [
    "the quick brown fox says hello to the world, and the world says: hello, fox!",
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n",
    "naïve café, 日本語の文章と東京, 🙂🙂👩‍👩‍👧 Ω≈ç 12345 == 67890\n\n",
] * 4


def byte_level(
    size: int = 420,
    special: tuple[str, ...] = ("<bos>", "<eos>", "<turn>"),
    split: str = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    roles: dict[str, str] | None = None,
    texts: list[str] = TEXTS,
) -> DraftTokenizer:
    """As GPT-2's: words are cut by ``split``, characters may be cut anywhere."""
    backend = tokenizers.Tokenizer(models.BPE())
    parts = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), parts])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    roles = {"bos_token": "<bos>", "eos_token": "<eos>"} if roles is None else roles
    return DraftTokenizer("byte-level", backend, roles)


def sentencepiece(*, fallback: bool = True) -> DraftTokenizer:
    """As Llama 2's: an underline before every word, also the first, and bytes for rare characters; or none for them."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=fallback, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    decoding = [decoders.Metaspace(), *([decoders.ByteFallback()] if fallback else []), decoders.Fuse()]
    backend.decoder = decoders.Sequence(decoding)
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], limit_alphabet=40, show_progress=False
    )
    backend.train_from_iterator([word for text in TEXTS for word in text.replace(" ", " ▁").split(" ")], trainer)
    document = json.loads(backend.to_str())
    vocabulary = document["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256 if fallback else 0)}
    roles = {"bos_token": "<s>", "eos_token": "</s>"}
    return DraftTokenizer("sentencepiece", tokenizers.Tokenizer.from_str(json.dumps(document)), roles)


@cache
def target() -> DraftTokenizer:
    """The target's."""
    return byte_level()


OWN = {
    "byte-level": lambda: byte_level(330, ("<|end|>",), r"\s+|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+", {"eos_token": "<|end|>"}),
    "sentencepiece": sentencepiece,
    "without bytes": lambda: sentencepiece(fallback=False),
}
"""The draft model's, by kind."""


@cache
def shared(kind: str) -> SharedVocabulary:
    """The map from the target's tokens to those of a kind."""
    own = OWN[kind]()
    return SharedVocabulary(target(), own, target_size=target().size, own_size=own.size)
