"""Where the tokens of a prompt stand in its text."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, processors

from router.schema.prompts import Prompt
from router.text.tokenizer import Tokenizer


def sentencepiece() -> Tokenizer:
    """As Llama 2's: a space before every text and behind every special token, one of which goes before the text."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "▁a", "▁b", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("▁", "b")], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize(
    ("text", "starts"),
    [("ab b", [0, 0, 1, 2]), ("a🎉 b", [0, 0, 1, 1, 1, 1, 2]), (" ab", [0, 0, 1, 2]), ("a</s>b b", [0, 0, 1, 5, 6])],
)
def test_a_text_has_its_tokens_where_they_are_written(text: str, starts: list[int]) -> None:
    tokenizer = sentencepiece()
    tokens = tokenizer.encode(text, special=True)
    assert [*Prompt(tokens, text).starts(tokenizer)] == starts
    if text.startswith(" "):
        return  # Its first token has no text of its own where a decoder strips the first of two spaces.
    assert [*Prompt(tokens[1:], text).starts(tokenizer)] == starts[1:]
    if tokenizer.decode(tokens) == text:
        assert [*Prompt(tokens).starts(tokenizer)] == starts
