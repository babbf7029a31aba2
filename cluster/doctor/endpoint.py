"""The HTTP address as an application meets it: it serves, streams, and says the same with and without drafts."""

from __future__ import annotations

from collections.abc import Iterator

import httpx

from cluster.completion import CompletionRequest, CompletionTally, bearer, is_local, stream
from cluster.console import CommandError
from cluster.doctor.finding import Finding, ok, problem, warning

PROMPT = "def fib(n):"
TOKENS = 128
ANSWER_SECONDS = 10.0


def check(url: str, api_key: str = "") -> Iterator[Finding]:
    """Models, of each one short streamed completion, and the same without drafts."""
    subject = f"http {url}"
    try:
        with httpx.Client(trust_env=not is_local(url), timeout=ANSWER_SECONDS) as client:
            answer = client.get(f"{url.rstrip('/')}/v1/models", headers=bearer(api_key)).raise_for_status()
        models = [str(entry["id"]) for entry in answer.json()["data"]]
    except (CommandError, httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        text = f"does not serve: {error or type(error).__name__}"
        yield problem(subject, text, "start Paceline, or give the address of its router with --url")
        return
    if not models:
        yield problem(subject, "answers but serves no model", "no target worker is connected; check them with --target")
        return
    yield ok(subject, f"serves {', '.join(models)}")
    for model in models:
        request = CompletionRequest(PROMPT, TOKENS, temperature=0.8, seed=1, api_key=api_key, model=model)
        yield from _compare(f"{subject}, {model}" if len(models) > 1 else subject, url, request)


def _compare(subject: str, url: str, request: CompletionRequest) -> Iterator[Finding]:
    drafted, plain = CompletionTally(), CompletionTally()
    try:
        for tally, speculate in ((drafted, True), (plain, False)):
            for _ in stream(url, request, tally, speculate=speculate):
                pass
    except CommandError as error:
        yield problem(subject, f"a completion failed: {error}", "look at the logs of router and target for its reason")
        return
    yield from judge(subject, drafted, plain)


def judge(subject: str, drafted: CompletionTally, plain: CompletionTally) -> Iterator[Finding]:
    """Of the same request with and without drafts."""
    rate = f"{drafted.tokens} tokens" + (f" at {drafted.rate:.0f} tokens/s" if drafted.rate else "")
    if drafted.text != plain.text:
        text = f"{rate}, but the text differs without drafts"
        fix = "rounding below float32 does that on a GPU; with dtype float32, or on a CPU, report it as an error"
        yield warning(subject, text, fix)
    elif not drafted.offered:
        yield warning(subject, f"{rate}, but no drafts were offered in time", "look for drafters: --draft or --address")
    else:
        share = drafted.accepted / drafted.offered
        text = f"streams {rate}, the same text with and without drafts, {share:.0%} of drafts accepted"
        yield ok(subject, text)
