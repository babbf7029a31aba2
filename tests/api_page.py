"""The table of every request field, read off their models; writes ``docs/api.md`` from it and the table of errors.

``python -m tests.api_page > docs/api.md``
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from router.errors import CODES
from router.schema.fields import REFUSED_MARK, Schema, in_words, json_schema
from router.schema.request_schema import BODIES, Kind

LABEL_MARK = "No effect. "
"""With which the description of a label begins."""


class FieldSupport(StrEnum):
    """What becomes of a field."""

    SUPPORTED = "supported"
    LABEL = "accepted, has no effect"
    REFUSED = "refused"


MARKS = {REFUSED_MARK: FieldSupport.REFUSED, LABEL_MARK: FieldSupport.LABEL}


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field, by the path to it: ``stream_options.include_usage``, ``messages[].role``."""

    name: str
    schema: Schema
    """JSON Schema of its values but null; of a refused one, of those that ask for nothing."""
    about: str
    """What it does; of a refused one, why it does not."""
    default: str = ""
    """In words."""
    examples: tuple[object, ...] = ()
    where: Literal["both", Kind] = "both"
    """The endpoints that know it."""
    required: bool = False
    support: FieldSupport = FieldSupport.SUPPORTED

    @property
    def inside(self) -> str:
        """The path of the object it is a field of; empty for the body."""
        return self.name.rpartition(".")[0]

    @property
    def own_name(self) -> str:
        """Without the path."""
        return self.name.rpartition(".")[2]

    def of(self, kind: Kind) -> bool:
        """Whether the endpoint knows it."""
        return self.where in ("both", kind)


def _rows(body: Schema, where: Literal["both", Kind], inside: str = "") -> Iterator[FieldRow]:
    """The fields of an object that are described, and those of the objects inside it."""
    for key, field in body["properties"].items():
        name = inside + key
        if "description" in field:
            schema = {part: field[part] for part in field.keys() - {"default", "description", "examples"}}
            about, _, default = " ".join(field["description"].split()).partition(" Default: ")
            support = next(
                (support for mark, support in MARKS.items() if about.startswith(mark)), FieldSupport.SUPPORTED
            )
            about = about.removeprefix(REFUSED_MARK).removeprefix(LABEL_MARK)
            default = default or _shown(field.get("default"))
            examples, required = tuple(field.get("examples", ())), key in body.get("required", ())
            yield FieldRow(name, schema, about, default, examples, where, required, support)
        for inner, mark in ((field, "."), (field.get("items", {}), "[].")):
            if "properties" in inner:
                yield from _rows(inner, where, name + mark)


def _shown(default: object) -> str:
    if default is None:
        return ""
    return f"{default:g}" if isinstance(default, float) else json.dumps(default)


def _table() -> Iterator[FieldRow]:
    """What both endpoints know alike is there once."""
    tables = {kind: {row.name: row for row in _rows(json_schema(body), "both")} for kind, body in BODIES.items()}
    for kind, table in tables.items():
        for name, row in table.items():
            alike = all(other.get(name) == row for other in tables.values())
            if not alike:
                yield replace(row, where=kind)
            elif kind == "completion":
                yield row


ROWS: tuple[FieldRow, ...] = tuple(_table())


_INTRODUCTION = """\
# The HTTP API

<!-- Written by `python -m tests.api_page > docs/api.md` from the models of request bodies; do not edit. -->

`POST /v1/completions` and `POST /v1/chat/completions` are OpenAI's, with vLLM's additional fields. An application moves
here by changing its base URL. `GET /v1/models` lists what is served; `/openapi.json` describes everything to machines.

Every field is in the table below. One that is not is refused with a 400 that names it, whatever its value; so is one
that is here but refused, unless its value asks for nothing. For a field of the table `null` is the same as leaving it
out. Nothing is silently ignored: only the labels at the end of the table have no effect. "chat" and "text" say which of
the two endpoints knows a field that is not on both.

How the text is made (drafted or not, by whom, on which workers) never changes it: for the same seed it is the same.
`speculation.rule` `rejection` alone is weaker: drafts change which text a seed gives, and not how likely each text is.

## Request fields
"""

_ANSWERS = """\

## Answers

- `logprobs` are the model's own: before penalties, biases, masks, temperature and filters. There is one entry for each
  token of the answer, in the chunk in which its text is complete. Tokens whose text a stop string cuts off have none;
  the stop token that ends a text has one. A token that is a part of a character is written `bytes:\\xf0\\x9f`; tokens
  that share a character share its `text_offset`, as does the one right behind bytes that are no character. `bytes` is
  null for special tokens. Minus infinity is written -9999.
- `token_ids` are of all `completion_tokens`, also of a stop string that does not show. In a stream they come with their
  commit, even where their text is held back.
- A `stop` that is the name of a special token is that token: it ends the text also where such tokens do not show.
- In a completion's `top_logprobs` the token that was drawn is always there, beyond the number asked for if need be.
- With `echo` the answer begins with the prompt, as it was given. With `max_tokens` 0 and `echo` nothing is generated.
- `prompt_logprobs`, and `echo` with `logprobs`, have the prompt computed without the prefix cache, and at most
  1,048,576 log-probabilities are told of the prompts of a request, those of each choice counted. The `rank` of a prompt
  token that is not among the likeliest is null.
- Tool calls are found in the text by the form that the model's chat template shows. A streamed call comes whole, in one
  chunk. What looks like a call and is none stays text. So does all in the reasoning that an answer begins with, between
  `<think>` (which may end the prompt instead) and `</think>`: a call that is drafted there may be rejected there.

## What was drafted

With `stream_options.include_speculation` every streamed chunk that stands for a commit, even one without text, says

```
"speculation": {"accepted": a, "offered": o, "tokens": n, "position": p,
                "pieces": [{"text": "...", "drafted": d, "source": s}]}
```

`n` tokens were committed at position `p` and after (positions count the prompt), `a` of them drafted, out of `o` draft
tokens verified. The texts of the pieces together are the text of the chunk, or, where tools are offered, what it was
before calls were looked for in it; `s` is a draft source, or `recovered` (the target's own instead of a refused draft),
`bonus` (after everything offered was kept) or `target` (where nothing was offered). With `speculation.details` also

```
"step": {"start": s, "end": s, "waited": s},
"committed": [{"id": i, "text": "...", "source": s}],
"proposals": [{"source": "draft", "start": s, "end": s, "anchor": p, "after": m,
               "tokens": [{"id": i, "text": "...", "number": m}], "parents": [-1, 0], "confidence": [0.9, 0.8]}]
```

the target's step, each token of the commit, and what drafters had proposed since the commit before, in seconds since
the choice began, by the router's clock: an end is when it heard of it, a start that minus what the worker says it took.
Draft tokens are numbered; a proposal continues the one numbered `after`, or the committed text at position `anchor`. An
answer with details ends with the `summary` of all its choices; one that is not streamed also has `commits`: what the
chunks would have. `usage.completion_tokens_details` counts `accepted_draft_tokens` and `rejected_draft_tokens` in any
case.

## Errors

An error is `{"error": {"message", "type", "param", "code"}}`; `param` is the path of the field at fault. Within a
stream it is the last event.

| code | status | type | try again | meaning |
|---|---|---|---|---|
"""
_LIMITS = """\

## Limits

What an API key may ask for is limited by `admission.*`, or behind the key in its file ([installing](install.md)). Where
requests or tokens a minute are limited, every answer says by OpenAI's headers `x-ratelimit-limit-requests`,
`x-ratelimit-remaining-requests`, `x-ratelimit-reset-requests`, and the same of `tokens`, what is left. Unless it is set
otherwise, a key has at most half of a router's places for choices at once, and 4,096 tokens for each of them; a request
that is the only one of its key is let in whatever it brings. Beyond a limit the answer is 429 `rate_limit_exceeded`,
which says which limit; `retry-after` says in how many seconds a request can be expected to get in. What was let in is
never cut short.

## Whether it serves

`GET /ready` answers 200 while requests can be served, else 503 with the reason, and needs no key. While workers load,
`starting` says of each what it does: `{"role": "target", "model": "llama", "doing": "loading weights: 120 of 290
tensors", "fraction": 0.41}`; `fraction` is null where nobody knows. Where several `models` are configured and all start
anew, it is 503 until each has had a target, or for half an hour; where the router can read the tokenizer of no model
that has a target, until it can. A model whose targets load or are lost is refused with 503 `unavailable`, while others
are served; `/v1/models` lists those that have a target, or had one that is still listed, or was within five minutes.
"""


def document() -> str:
    """The page."""
    fields = "| field | | values | default | what it does, or why it does not |\n|---|---|---|---|---|\n"
    errors = (
        f"| `{row.name}` | {row.status} | `{row.type}` | {'yes' if row.retryable else 'no'} | {row.meaning} |\n"
        for row in CODES.values()
    )
    return _INTRODUCTION + "\n" + fields + "".join(map(_line, _ordered(ROWS))) + _ANSWERS + "".join(errors) + _LIMITS


def _ordered(rows: Sequence[FieldRow]) -> list[FieldRow]:
    """What a request must have, what it may have, what is refused, and labels; else as in the table."""
    needed = {row.name for row in rows if row.required}
    rank = {FieldSupport.SUPPORTED: 0, FieldSupport.REFUSED: 1, FieldSupport.LABEL: 2}
    return sorted(rows, key=lambda row: (rank[row.support], row.name.partition("[")[0] not in needed))


def _line(row: FieldRow) -> str:
    where = {"both": "", "completion": " (text)", "chat": " (chat)"}[row.where]
    support = str(row.support)
    if row.support is FieldSupport.REFUSED:
        neutral = [f"`{json.dumps(value)}`" for value in row.schema["enum"] if value is not None]
        values = f"only {' or '.join(neutral)}" if neutral else ""
        return f"| `{row.name}`{where} | {support} | {values} | | {_sentence(row.about)} |\n"
    default = "required" if row.required else row.default
    return f"| `{row.name}`{where} | {support} | {in_words(row.schema)} | {default} | {_sentence(row.about)} |\n"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].removesuffix(".") + "."


if __name__ == "__main__":
    sys.stdout.write(document())
