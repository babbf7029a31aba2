"""Steering and seeing speculation over HTTP, with real workers: the same text in every way, and counts that add up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from router.service import Router, RouterSettings
from speculation.events import Own
from speculation.settings import Source
from target_service.verify_loop import TargetLimits
from tests.stack import draft_worker, target_worker

TOKENS = 36
PROMPT = "def add(a, b):\n"


@asynccontextmanager
async def serving(model: str | Path = "target") -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client of a router with a target and a drafter. All drafts are verified, whatever steps cost now."""
    async with target_worker(TargetLimits(adaptive=False), model=model) as target, draft_worker() as draft:
        router = Router(RouterSettings([target.worker.address], [draft.worker.address], port=0))
        await router.start()
        try:
            async with openai.AsyncOpenAI(base_url=f"{router.address}/v1", api_key="none", max_retries=0) as client:
                yield client
        finally:
            await router.stop()


async def complete(client: openai.AsyncOpenAI, sampling: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The whole answer."""
    body = {"ignore_eos": True} | fields
    answer = await client.completions.create(
        model="target", prompt=PROMPT, max_tokens=TOKENS, extra_body=body, **sampling
    )
    return answer.model_dump()


def expecting(text: str) -> dict[str, Any]:
    return {"type": "content", "content": text}


def half_right(text: str) -> str:
    """A word replaced, some text left out, some put in."""
    third = len(text) // 3
    return text[: third - 4] + " changed" + text[third : 2 * third] + " added\n" + text[2 * third + 6 :]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "drawn"])
async def test_predictions_right_wrong_and_half_right_leave_the_text_as_it_is(sampling: dict[str, Any]) -> None:
    async with serving() as client:
        plain = await complete(client, sampling, speculation={"enabled": False, "details": True})
        text = plain["choices"][0]["text"]
        predictions = {"right": text, "wrong": text[::-1], "half": half_right(text), "absent": "", "long": text * 20}
        alone = {"sources": ["prediction"], "details": True}
        answers = {
            kind: await complete(client, sampling, prediction=expecting(content), speculation=alone)
            for kind, content in predictions.items()
        }
        mixed = [
            await complete(client, sampling, prediction=expecting(content), speculation=speculation)
            for content, speculation in ((half_right(text), {}), (text, {"max_depth": 2}), (text, {"enabled": False}))
        ]
    assert [answer["choices"][0]["text"] for answer in (*answers.values(), *mixed)] == [text] * (5 + 3)
    steps = {kind: answer["speculation"]["summary"]["steps"] for kind, answer in answers.items()}
    assert plain["speculation"]["summary"]["steps"] == steps["absent"] == TOKENS
    assert steps["right"] < TOKENS / 3
    assert steps["right"] <= steps["half"] < steps["absent"]
    counts = {kind: answer["usage"]["completion_tokens_details"] for kind, answer in answers.items()}
    assert counts["right"]["accepted_prediction_tokens"] == TOKENS - steps["right"]
    assert counts["wrong"]["rejected_prediction_tokens"] > 0
    assert counts["absent"]["accepted_prediction_tokens"] == counts["absent"]["rejected_prediction_tokens"] == 0


async def test_the_official_client_sends_a_prediction_and_reads_what_became_of_it() -> None:
    messages: Any = [{"role": "user", "content": "Say it again."}]
    async with serving() as client:
        ask = {"model": "target", "messages": messages, "temperature": 0.0, "max_completion_tokens": TOKENS}
        plain = await client.chat.completions.create(**ask)
        said = plain.choices[0].message.content
        prediction: Any = {"type": "content", "content": [{"type": "text", "text": said}]}
        only = {"speculation": {"sources": ["prediction"]}}
        answer = await client.chat.completions.create(**ask, prediction=prediction, extra_body=only)
    assert said
    assert answer.choices[0].message.content == said
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.accepted_prediction_tokens > answer.usage.completion_tokens / 2
    assert details.rejected_prediction_tokens is not None


@pytest.mark.thorough
async def test_what_is_told_of_speculation_adds_up(slow_target: Path) -> None:
    sampling = {"temperature": 0.0}
    async with serving(slow_target) as client:
        expected = (await complete(client, sampling))["choices"][0]["text"]
        fields = {"speculation": {"details": True}, "prediction": expecting(half_right(expected))}
        whole = await complete(client, sampling, **fields)
        stream = await client.completions.create(
            model="target",
            prompt=PROMPT,
            max_tokens=TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=fields
            | {"ignore_eos": True, "stream_options": {"include_usage": True, "include_speculation": True}},
            **sampling,
        )
        chunks = [chunk.model_dump() async for chunk in stream]
    check_answer(whole["speculation"]["commits"], whole["speculation"]["summary"], whole["usage"])
    assert "".join(piece["text"] for one in whole["speculation"]["commits"] for piece in one["pieces"]) == expected
    told = [chunk["speculation"] for chunk in chunks if "speculation" in chunk]
    *commits, end = told
    assert list(end) == ["summary"]
    check_answer(commits, end["summary"], chunks[-1]["usage"])
    texts = [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]]
    assert "".join(texts) == expected
    proposals = [proposal for commit in commits for proposal in commit["proposals"]]
    assert proposals, "the drafter was heard of"
    for proposal in proposals:
        assert proposal["source"] == "draft"
        assert 0 < proposal["start"] < proposal["end"]
        assert len(proposal["tokens"]) == len(proposal["parents"]) == len(proposal["confidence"])
        assert all(-1 <= parent < i for i, parent in enumerate(proposal["parents"]))
        assert all(isinstance(token["text"], str) and token["id"] >= 0 for token in proposal["tokens"])


def check_answer(commits: list[dict[str, Any]], summary: dict[str, Any], usage: dict[str, Any]) -> None:
    """Commits follow each other without a gap, and the summary is that of them and of the usage."""
    position, ended = commits[0]["position"], 0.0
    for commit in commits:
        assert commit["position"] == position, json.dumps(commit)
        position += commit["tokens"]
        assert all(piece["drafted"] is (piece["source"] in list(Source)) for piece in commit["pieces"])
        assert {piece["source"] for piece in commit["pieces"]} <= {*Source, *Own}
        kept = [token["source"] in list(Source) for token in commit["committed"]]
        assert kept == [place < commit["accepted"] for place in range(commit["tokens"])]
        assert all(isinstance(token["text"], str) and token["id"] >= 0 for token in commit["committed"])
        step = commit["step"]
        assert ended < step["end"]
        assert step["start"] < step["end"]
        assert step["waited"] >= 0
        ended = step["end"]
    details = usage["completion_tokens_details"]
    by_source, own = summary["by_source"], summary["own"]
    totals = Counter[str]()
    for counts in by_source.values():
        totals.update(counts)
    assert totals["accepted"] == sum(commit["accepted"] for commit in commits) == details["accepted_draft_tokens"]
    assert totals["offered"] == sum(commit["offered"] for commit in commits)
    assert totals["offered"] - totals["accepted"] == details["rejected_draft_tokens"]
    prediction = by_source["prediction"]
    assert prediction["accepted"] == details["accepted_prediction_tokens"] > 0
    assert prediction["offered"] - prediction["accepted"] == details["rejected_prediction_tokens"]
    assert usage["completion_tokens"] == totals["accepted"] + sum(own.values()) == TOKENS
    assert summary["steps"] == len(commits)
    drafts = [commit["accepted"] for commit in commits if commit["offered"]]
    assert summary["mean_acceptance_length"] == pytest.approx(1 + sum(drafts) / len(drafts))
    assert summary["by_position"] == [
        pytest.approx(sum(kept >= place for kept in drafts) / len(drafts), abs=1e-4)
        for place in range(1, max(drafts) + 1)
    ]
    assert summary["reopened"] == 0
    assert len(summary["target"]) == len(summary["draft"]) == 1
    waits = [commit["step"]["waited"] for commit in commits if commit["step"]["waited"]]
    assert (summary["waits"], summary["wait_seconds"]) == (len(waits), pytest.approx(sum(waits), abs=1e-3))
