"""Tokens of two tokenizers are the same if they mean the same; too few of those are refused at the start."""

from __future__ import annotations

import json
import shutil
from math import log
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models

from draft_service.tokenizer import DraftTokenizer, SharedVocabulary
from draft_service.translation import OtherVocabulary, Overlap, check, read_vocabularies
from engine.loading.loader import load
from engine.model import Model, ModelError
from tests.bundled import MODELS
from tests.other_tokenizers import OWN, byte_level, sentencepiece, shared, target


def words(*pieces: str, name: str = "words") -> DraftTokenizer:
    """A byte-level tokenizer of these tokens alone."""
    backend = tokenizers.Tokenizer(models.BPE({piece: token for token, piece in enumerate(pieces)}, []))
    backend.decoder = decoders.ByteLevel()
    return DraftTokenizer(name, backend)


def joined(one: DraftTokenizer, other: DraftTokenizer) -> SharedVocabulary:
    return SharedVocabulary(one, other, target_size=one.size, own_size=other.size)


@pytest.mark.parametrize("kind", OWN)
def test_shared_tokens_stand_for_the_same_bytes_however_they_are_written(kind):
    vocabulary = shared(kind)
    meant = [
        (vocabulary.target.bytes_of[one], vocabulary.own.bytes_of[other]) for one, other in vocabulary.own_of.items()
    ]
    assert all(one == other for one, other in meant)
    assert (b" the", b" the") in meant or kind == "byte-level"
    assert len(set(vocabulary.own_of.values())) == len(meant)


def test_a_token_for_a_byte_is_that_byte_but_a_character_with_a_token_of_its_own_is_that():
    own = sentencepiece()
    assert own.bytes_of[own.by_bytes[b"\xe6"]] == b"\xe6"
    assert own.by_bytes[b"\xe6"] in own.fallback
    assert own.by_bytes[b"h"] not in own.fallback
    vocabulary = joined(own, target())
    assert vocabulary.own_of[own.by_bytes[b"\xe6"]] == target().by_bytes[b"\xe6"]


def test_special_tokens_are_the_same_by_name_else_by_role_and_never_as_text():
    one = byte_level(special=("<bos>", "<eos>", "<turn>", "<end>"))
    other = byte_level(300, ("<turn>", "<s>", "</s>"), roles={"bos_token": "<s>", "eos_token": "</s>"})
    vocabulary = joined(one, other)
    assert vocabulary.special == {0: 1, 1: 2, 2: 0}
    assert {token for token in vocabulary.own_of if one.bytes_of[token] is None} == {1, 2}  # what begins is not said
    text, _ = other.encode("<turn></s>")
    assert 0 not in text
    assert b"".join(other.bytes_of[token] or b"" for token in text) == b"<turn></s>"


def test_an_own_token_counts_for_the_longest_shared_one_it_begins_with():
    vocabulary = joined(words("a", "ab", "c", "abcde"), words("abcd", "ab", "c", "x", "a"))
    assert vocabulary.own_of == {0: 4, 1: 1, 2: 2}
    assert vocabulary.begins == {0: 1, 1: 1, 2: 2, 4: 0}


def test_ids_beyond_either_model_are_not_shared():
    one, other = target(), byte_level(330, ())
    vocabulary = SharedVocabulary(one, other, target_size=100, own_size=200)
    assert vocabulary.size == 100
    assert max(vocabulary.own_of) < 100
    assert max(vocabulary.own_of.values()) < 200


def test_too_small_an_overlap_is_refused_with_the_overlap():
    pieces = [chr(0x4E00 + n) for n in range(99)]
    with pytest.raises(
        ModelError, match=r"^mine shares 1 of 100 tokens with the target's tokenizer, 1\.0%; at least 2%"
    ) as e:
        joined(words("a", *pieces), words("a", "b", name="mine"))
    assert "\n" not in str(e.value)


def test_what_could_hardly_be_accepted_is_refused_with_the_overlap():
    check(Overlap(0.26, 0.9), shared("byte-level"))
    with pytest.raises(ModelError, match=r"shares 83% of the target's tokens, 90% of what it says, and 24% of") as e:
        check(Overlap(0.9, 0.24), shared("byte-level"))
    assert "\n" not in str(e.value)


def test_tokens_that_cannot_be_read_as_bytes_are_refused():
    backend = tokenizers.Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match=r"^bert: its tokens cannot be read as bytes \(decoder: WordPiece\)"):
        DraftTokenizer("bert", backend)


def test_logits_are_read_where_the_target_has_the_shared_tokens():
    vocabulary = joined(words("a", "b", "c", "d"), words("x", "c", "a", "cx"))
    about: dict[str, Any] = {"name": "", "module": torch.nn.Module(), "config": SimpleNamespace(), "vocabulary": 4}
    about |= {"context": 9, "stop_tokens": frozenset(), "tokenizer_digest": 1, "dtype": torch.float32, "layers": 0}
    reader = OtherVocabulary(Model(device=torch.device("cpu"), **about), vocabulary)
    read_RV = reader.read(torch.tensor([[1.0, 2.0, 3.0, float("-inf")], [4.0, 5.0, 6.0, 5.0]]))
    never = float("-inf")  # what is said of "cx" counts for "c"
    torch.testing.assert_close(read_RV, torch.tensor([[3.0, never, 2.0, never], [6.0, never, 5.0 + log(2), never]]))
    assert reader.model.vocabulary == 4


def test_the_same_tokenizer_needs_no_translation():
    assert read_vocabularies(str(MODELS / "draft"), "") is None
    assert read_vocabularies(str(MODELS / "draft"), str(MODELS / "target")) is None


def test_the_digest_is_the_one_that_the_target_gives(tmp_path):
    known = read_vocabularies(str(MODELS / "draft_other"), str(MODELS / "target"))
    assert known is not None
    assert known.digest == load(str(MODELS / "target"), dtype="float32", self_test=False).tokenizer_digest
    assert known.target_size == 4000
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "target" / name, tmp_path)
    alone = read_vocabularies(str(MODELS / "draft_other"), str(tmp_path))  # without the model
    assert alone is not None and alone.digest == known.digest


@pytest.mark.parametrize("broken", ["", "{}", json.dumps({"model": 3})])
def test_a_tokenizer_that_is_none_is_one_line(tmp_path, broken):
    if broken:
        (tmp_path / "tokenizer.json").write_text(broken)
    with pytest.raises(ModelError, match=f"^{tmp_path}: ") as e:
        read_vocabularies(str(MODELS / "draft"), str(tmp_path))
    assert "\n" not in str(e.value)
