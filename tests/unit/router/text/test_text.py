"""Detokenisation, stop strings and the tokenizer against plain searches and plain decoding of the whole."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from router.text.chat_template import ChatTemplate, TemplateError
from router.text.text import WINDOW, Delta, Detokenizer, StopMatcher, TextRules, TextStream
from router.text.tokenizer import FILES, Tokenizer, TokenizerError
from speculation.events import Origin, Own
from speculation.messages import Source
from tests.fakes import BOS, EOS, TURN, tiny_tokenizer

BUNDLED = Path(__file__).parents[4] / "models" / "target"
TEXT = "hello wörld, 世界 🎉 the fox\n"
S = TypeVar("S", str, tuple[int, ...])
QUICK = settings(max_examples=150, derandomize=True)


@cache
def shared() -> Tokenizer:
    return tiny_tokenizer()


def ids(text: str) -> tuple[int, ...]:
    return shared().encode(text, special=False)


def split(items: S, sizes: list[int]) -> list[S]:
    """Cut at the running sums of ``sizes``; the last part takes the rest."""
    cuts = [0, *[c for c in accumulate(sizes) if c < len(items)], len(items)]
    return [items[a:b] for a, b in pairwise(cuts)]


# Detokenizer


@QUICK
@given(st.lists(st.integers(0, shared().size - 1), max_size=60))
def test_pieces_join_to_the_decoded_whole(tokens: list[int]) -> None:
    detokenizer = Detokenizer(shared())
    pieces = [detokenizer.push(token) for token in tokens]
    assert "".join(pieces) + detokenizer.finish() == shared().decode(tokens)


class Slow(Tokenizer):
    """Knows nothing of a token alone."""

    def whole(self, token: int) -> str:
        return ""


@QUICK
@given(st.lists(st.one_of(st.integers(0, shared().size + 2), st.sampled_from(ids("世é\ufffda "))), max_size=60))
def test_what_a_token_adds_alone_is_what_it_adds_among_others(tokens: list[int]) -> None:
    slow = tiny_tokenizer()
    slow.__class__ = Slow
    one, other = Detokenizer(shared()), Detokenizer(slow)
    assert [one.push(token) for token in tokens] == [other.push(token) for token in tokens]
    assert one.finish() == other.finish()


def test_a_token_alone_says_nothing_where_a_text_is_more_than_its_bytes() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"\u2581a": 0, "b": 1}, unk_token="b"))
    backend.decoder = decoders.Metaspace()
    assert Tokenizer(backend).whole(0) == ""
    assert shared().whole(ids("a")[0]) == "a"
    assert {shared().whole(token) for token in ids("世")} == {""}


@QUICK
@given(st.text(st.sampled_from("ab\ufffd世🎉"), max_size=40), st.lists(st.sampled_from(ids("世🎉é")), max_size=20))
def test_pieces_join_to_the_whole_with_replacement_characters_and_lone_bytes(text: str, lone: list[int]) -> None:
    tokens = [*lone, *ids(text), *lone, *ids(text)]
    detokenizer = Detokenizer(shared())
    pieces = [detokenizer.push(token) for token in tokens]
    assert "".join(pieces) + detokenizer.finish() == shared().decode(tokens)


def test_a_character_split_over_tokens_comes_out_once_it_is_complete() -> None:
    detokenizer = Detokenizer(shared())
    tokens = ids("🎉")
    assert len(tokens) == 4
    assert [detokenizer.push(token) for token in tokens] == ["", "", "", "🎉"]


def test_an_incomplete_character_is_flushed_as_a_replacement_character() -> None:
    detokenizer = Detokenizer(shared())
    assert detokenizer.push(ids("🎉")[0]) == ""
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("token", [EOS, ids("\ufffd")[0]], ids=["special", "broken byte"])
def test_what_is_held_back_stays_bounded(token: int) -> None:
    detokenizer = Detokenizer(shared())
    for _ in range(500):
        detokenizer.push(token)
        assert len(detokenizer._pending) <= WINDOW + 4


def test_replacement_characters_that_the_model_means_are_streamed() -> None:
    detokenizer = Detokenizer(shared())
    out = [detokenizer.push(token) for token in ids("\ufffd" * 100)]
    assert sum(map(len, out)) >= 90


def byte_fallback() -> Tokenizer:
    vocabulary = {"<unk>": 0, "▁a": 1, "b": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    strip = decoders.Strip(" ", 1, 0)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    backend.decoder = decoders.Sequence(parts)
    return Tokenizer(backend)


def test_byte_fallback_survives_a_bad_byte_after_a_good_character() -> None:
    detokenizer = Detokenizer(byte_fallback())
    tokens = [*(3 + byte for byte in "中".encode()), 3 + 0xFF, 2]
    assert [detokenizer.push(token) for token in tokens] == ["", "", "中", "", "\ufffdb"]


def test_the_space_after_a_prompt_is_kept_where_the_decoder_strips_a_texts_first() -> None:
    assert Detokenizer(byte_fallback()).push(1) == "a"
    assert Detokenizer(byte_fallback(), after=[2]).push(1) == " a"


# StopMatcher


def cut(text: str, stops: list[str], unsearched: int = 0) -> tuple[str, bool]:
    """Plain search: look at the text after every character but the first ``unsearched``."""
    for end in range(unsearched + 1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


SMALL = st.text(st.sampled_from("ab"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=6), max_size=4)
SIZES = st.lists(st.integers(1, 5), max_size=20)


@settings(QUICK, max_examples=500)
@given(SMALL, STOPS, SIZES)
def test_any_split_finds_what_a_search_of_the_whole_text_finds(text: str, stops: list[str], sizes: list[int]) -> None:
    matcher, out = StopMatcher(stops), ""
    expected, found = cut(text, stops)
    for part in split(text, sizes):
        out += matcher.push(part)
        assert expected.startswith(out), "text of a stop string leaked"
        if matcher.matched:
            break
    else:
        out += matcher.finish()
    assert (out, matcher.matched) == (expected, found)


@settings(QUICK, max_examples=300)
@given(SMALL, STOPS)
def test_no_more_is_held_back_than_can_still_match(text: str, stops: list[str]) -> None:
    matcher, out = StopMatcher(stops), ""
    for end, character in enumerate(text, 1):
        out += matcher.push(character)
        if matcher.matched:
            return
        ends = (text[:end][-n:] for n in range(1, end + 1))
        longest = max((len(e) for e in ends if any(stop.startswith(e) for stop in stops)), default=0)
        assert out == text[: end - longest]


def test_of_two_stop_strings_the_first_completed_wins() -> None:
    matcher = StopMatcher(["abc", "b"])
    assert matcher.push("xabc") == "xa"
    assert matcher.matched


# TextStream


def run(stream: TextStream, parts: list[tuple[int, ...]]) -> tuple[str, int, bool]:
    text, tokens = "", 0
    for part in parts:
        delta = stream.push(part, origins(len(part), len(part) - 1))
        text, tokens = text + joined(delta), tokens + delta.tokens
        if delta.stopped:
            return text, tokens, True
    rest = stream.finish()
    return text + joined(rest), tokens, rest.stopped


def origins(tokens: int, drafted: int) -> list[Origin]:
    """The first ``drafted`` by prompt lookup, the others the target's own."""
    return [Source.LOOKUP if i < drafted else Own.RECOVERED for i in range(tokens)]


def joined(delta: Delta) -> str:
    return "".join(piece.text for piece in delta.pieces)


@QUICK
@given(SIZES, st.sampled_from([(), ("世界",), ("fox", "the fox"), ("🎉 ", "nowhere"), ("\n",), ("lo w", "o")]))
def test_text_and_count_do_not_depend_on_the_commits(sizes: list[int], stops: tuple[str, ...]) -> None:
    tokens = ids(TEXT)
    got = run(TextStream(shared(), TextRules(tuple(stops), frozenset())), split(tokens, sizes))
    assert got == run(TextStream(shared(), TextRules(tuple(stops), frozenset())), [(token,) for token in tokens])
    text, count, stopped = got
    assert (text, stopped) == cut(TEXT, list(stops))
    # The count goes up to the token that completed the stop string, and no further.
    enough, fewer = shared().decode(tokens[:count]), shared().decode(tokens[: count - 1])
    assert cut(enough, list(stops))[1] == stopped
    assert not cut(fewer, list(stops))[1]


@settings(QUICK, max_examples=500)
@given(SMALL, STOPS, SIZES, st.integers(0, 10), st.booleans())
def test_a_stop_string_counts_where_it_ends(
    text: str, stops: list[str], sizes: list[int], unsearched: int, placed: bool
) -> None:
    tokens = ids(text)
    assert len(tokens) == len(text)
    stream = TextStream(shared(), TextRules(tuple(stops), unsearched=unsearched), placed=placed)
    got, _, stopped = run(stream, split(tokens, sizes))
    assert (got, stopped) == cut(text, stops, unsearched)


def test_pieces_say_who_proposed_the_text_also_when_it_was_held_back() -> None:
    stream = TextStream(shared(), TextRules(("xyz",)))
    first = stream.push(ids("a") + ids("x") + ids("y"), origins(3, 2))
    assert [(piece.text, piece.origin) for piece in first.pieces] == [("a", "lookup")]
    second = stream.push(ids("b"), origins(1, 0))
    assert [(p.text, p.origin) for p in second.pieces] == [("x", "lookup"), ("y", "recovered"), ("b", "recovered")]
    assert [isinstance(piece.origin, Own) for piece in second.pieces] == [False, True, True]


def test_stop_tokens_and_special_tokens_have_no_text() -> None:
    letter = ids("q")[0]
    stream = TextStream(shared(), TextRules(stop_tokens=frozenset({letter})))
    delta = stream.push(said := (*ids("hello"), TURN, BOS, letter), origins(len(said), 0))
    assert joined(delta) == "hello"
    assert delta.tokens == len(ids("hello")) + 3


def test_a_stop_string_may_be_completed_by_what_is_flushed_at_the_end() -> None:
    stream = TextStream(shared(), TextRules(("\ufffd",)))
    assert joined(stream.push((*ids("a"), ids("🎉")[0]), origins(2, 0))) == "a"
    rest = stream.finish()
    assert (joined(rest), rest.stopped) == ("", True)


# Tokenizer and chat template


def test_the_bundled_tokenizer_loads_with_its_template_and_end_of_text() -> None:
    tokenizer = Tokenizer.load(str(BUNDLED))
    code = "def fib(n):\n    return n  # é 世界\n"
    assert tokenizer.decode(tokenizer.encode(code, special=True)) == code
    assert tokenizer.stop_tokens == {json.loads((BUNDLED / "config.json").read_text())["eos_token_id"]}
    assert tokenizer.chat_template is not None
    assert "hello" in tokenizer.chat_template.render([{"role": "user", "content": "hello"}])


def test_router_modules_import_neither_torch_nor_transformers() -> None:
    script = "import sys, router.http.api; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'engine')))"
    root = Path(__file__).parents[4]
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True, timeout=60)


def test_encoding_adds_bos_only_where_asked() -> None:
    assert shared().encode("hi", special=True)[0] == BOS
    assert shared().encode("hi", special=False)[0] != BOS
    assert shared().encode("<turn>hi", special=False)[0] == TURN


def test_a_folder_without_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.load(str(tmp_path))


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "a" * 5000])
def test_a_name_that_no_folder_has_is_a_clear_error(name: str) -> None:
    with pytest.raises(TokenizerError, match="neither a folder nor available from the hub"):
        Tokenizer.load(name)


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"model": 3}'])
def test_a_broken_tokenizer_file_is_a_one_line_error(tmp_path: Path, broken: str) -> None:
    (tmp_path / "tokenizer.json").write_text(broken)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_files_beside_a_tokenizer_are_read_in_the_forms_that_exist(tmp_path: Path) -> None:
    shared()._backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "eos_token": {"content": "<eos>", "special": True},
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}!"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer.stop_tokens == {EOS, 2, 5}
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([]) == "<eos>!"
    (tmp_path / "chat_template.jinja").write_text("the file wins")
    again = Tokenizer.load(str(tmp_path))
    assert again.chat_template is not None
    assert again.chat_template.render([]) == "the file wins"


@pytest.mark.parametrize(
    ("said", "stops"),
    [
        ({"text_config": {"eos_token_id": 5}}, {5}),
        ({"eos_token_id": 2, "text_config": {"eos_token_id": [5, 6]}}, {2, 5, 6}),
        ({"eos_token_id": 2, "text_config": None}, {2}),
    ],
)
def test_the_configuration_of_the_text_may_be_within_that_of_the_model(
    tmp_path: Path, said: dict[str, Any], stops: set[int]
) -> None:
    shared()._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert Tokenizer.load(str(tmp_path)).stop_tokens == stops


@pytest.mark.parametrize(
    ("said", "mapped", "text"),
    [
        ({}, {"bos_token": "<s>", "eos_token": {"content": "<eos>"}}, "<s><eos>"),
        ({"eos_token": "<turn>"}, {"eos_token": "<eos>"}, "<eos>"),
        ({"eos_token": "<eos>", "added_tokens_decoder": {}}, {"bos_token": "<s>", "eos_token": "<turn>"}, "<eos>"),
    ],
)
def test_special_tokens_are_named_in_a_file_of_their_own_in_older_folders(
    tmp_path: Path, said: dict[str, Any], mapped: dict[str, Any], text: str
) -> None:
    """Read where transformers reads it."""
    shared()._backend.save(str(tmp_path / "tokenizer.json"))
    config = {**said, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ bos_token }}{{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(mapped))
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer.stop_tokens == {EOS}
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([]) == text
    assert "special_tokens_map.json" in FILES


def test_chat_templates_have_what_transformers_gives_them() -> None:
    source = (
        "  {% for m in messages %}\n"
        "{% if m.role == 'bad' %}{{ raise_exception('no bad roles') }}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n"
        "{% if loop.index == 1 %}{% break %}{% endif %}\n"
        "{% endfor %}\n"
        "{{ strftime_now('%Y') | length }}{{ tools is none }}"
    )
    template = ChatTemplate(source, {})
    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "left out"}]
    assert template.render(messages) == '{"role": "user", "content": "<é>"}4True'
    with pytest.raises(TemplateError, match="no bad roles"):
        template.render([{"role": "bad", "content": ""}])


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ nothing.at.all }}"])
def test_chat_templates_run_in_the_sandbox(source: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(TemplateError):
        template.render([])


def test_a_template_that_does_not_compile_is_an_error_at_once() -> None:
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate("{% for %}", {})
