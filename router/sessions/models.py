"""Which models a router serves, which revision of each is the newest, and whose tokens go together.

By what targets say of themselves. A model whose last target has left the list of workers is served for a while yet: a
target may come back, and until then its requests wait instead of being refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from router.generation import ServedModel
from speculation.messages import Welcome

FORGET_SECONDS = 300.0
"""How long a model is served on whose last target has left the list of workers: it may come back."""


def same_tokenizer(one: int, other: int) -> bool:
    """Whether two digests allow the same token ids; an unknown one does not object."""
    return one == other or 0 in (one, other)


def revision_ages(welcomes: Iterable[Welcome]) -> dict[int, float]:
    """When each revision came up, in seconds since 1970: the later, the newer.

    That of its oldest worker counts, so that an old revision does not become the newest by starting a worker again.
    """
    since: dict[int, float] = {}
    for welcome in welcomes:
        since[welcome.revision] = min(welcome.started, since.get(welcome.revision, welcome.started))
    return since


def why_useless(drafter: Welcome, tokenizers: Sequence[int], heads: Collection[int]) -> str:
    """Why a drafter has nothing to do beside targets with these tokenizers and EAGLE heads, if so."""
    if tokenizers and not any(same_tokenizer(drafter.tokenizer, tokenizer) for tokenizer in tokenizers):
        return "its tokenizer is that of no served model; start it with --target-tokenizer"
    if heads and drafter.head not in {0, *heads}:
        return "no target makes features for its EAGLE head; give both the same head, of the same target"
    return ""


def why_unavailable(model: str, began_with: int | None, present: set[int], why: str) -> str:
    """``why`` a text of this model finds no target, with what its session cannot know.

    ``began_with``: the revision that said its first tokens; ``present``: those that have a target now.
    """
    if began_with is not None and present - {began_with}:
        return (
            f"model {model} was replaced by another revision (weights, number format or ranks) and no target worker of "
            "the one that began this text is left; it would not go on with the same text, so ask again"
        )
    return f"{why} for model {model}"


class ServedModels:
    """All models that have, or lately had, a target."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[Welcome, float]] = {}
        """By name: what its newest target said, and when a target of it was last on the list."""

    def served(self, listed: Sequence[Welcome], up: Sequence[Welcome], now: float) -> dict[str, ServedModel]:
        """The models by name, for new requests: of each what the newest target says.

        ``listed``: how targets on the list of workers last introduced themselves; ``up``: those that are connected.
        """
        for welcome in listed:
            known, _ = self._newest.get(welcome.model, (welcome, now))
            self._newest[known.model] = known, now
        for name, (_, seen) in list(self._newest.items()):
            connected = [welcome for welcome in up if welcome.model == name]
            ages = revision_ages(connected)
            if connected:
                self._newest[name] = max(connected, key=lambda welcome: ages[welcome.revision]), seen
            if now - seen > FORGET_SECONDS:
                del self._newest[name]
        return {name: _served(welcome, listed) for name, (welcome, _) in sorted(self._newest.items())}


def _served(newest: Welcome, listed: Iterable[Welcome]) -> ServedModel:
    alike = [newest, *(welcome for welcome in listed if welcome.model == newest.model)]
    return ServedModel(
        newest.model,
        newest.vocabulary,
        newest.context,
        newest.tokenizer,
        newest.source,
        tuple(sorted({name for welcome in alike for name in welcome.sources})),
    )
