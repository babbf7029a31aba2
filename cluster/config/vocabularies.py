"""Whether a draft model has the tokenizer of its target, and what its workers are told if it has not.

Reads the two ``tokenizer.json`` only, so it knows of models that are folders here. What workers have in their hands
when they start decides: one that is told of a tokenizer that is its own translates nothing.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.config.config import Config
from cluster.config.environment import expanded
from cluster.config.pools import DraftConfig, Pool
from cluster.config.settings import AUTO, CheckError
from speculation.messages import Schedule


def worker_config(config: Config, pool: Pool) -> Config:
    """What a worker of the pool is started with; a draft worker that has to translate is told into which tokens.

    Raises :class:`cluster.config.checks.CheckError`.
    """
    chosen = config.of_worker(pool)
    if not isinstance(pool.settings, DraftConfig) or chosen.draft.target_tokenizer:
        return chosen
    target = target_of(config, pool)
    if not difference(target, chosen.draft.model):
        return chosen
    return replace(chosen, draft=replace(chosen.draft, target_tokenizer=target))


def may_draft_in_turn(config: Config) -> bool:
    """Whether there is one draft worker for one target that may as well work in its process.

    Nobody has said where it is to work, both are folders here with the same tokenizer, and nothing is wanted of the
    draft model that takes a draft worker.
    """
    draft, speculation = config.draft, config.speculation
    if config.models or config.autoscales or config.target.replicas != 1 or config.drafts != 1:
        return False
    wants_worker = draft.assistant or draft.target_tokenizer or draft.tensor_parallel_size > 1
    if draft.placement != AUTO or wants_worker or Schedule(speculation.schedule) is not Schedule.TRIE:
        return False
    theirs, ours = _vocabulary(config.target.model), _vocabulary(draft.model)
    return theirs is not None and theirs == ours


def target_of(config: Config, pool: Pool) -> str:
    """The model of the targets that a draft pool drafts for."""
    models = [other.settings.model for other in config.pools() if other.model == pool.model]
    return models[0]


def difference(target: str, draft: str) -> str:
    """In words, how the vocabularies of two model folders differ; empty if they do not, or one is no folder here.

    They must number the same tokens the same way. Padding of the embeddings does not matter. Raises
    :class:`cluster.config.checks.CheckError`.
    """
    if target == draft:
        return ""
    theirs, ours = _vocabulary(target), _vocabulary(draft)
    if ours is None or theirs is None or ours == theirs:
        return ""
    different = sum(ours.get(token) != theirs.get(token) for token in ours.keys() | theirs.keys())
    return f"{len(theirs)} and {len(ours)} tokens, {different} ids mean something else"


def _vocabulary(model: str) -> dict[int, str] | None:
    """Token id to token, or None where there is no tokenizer.json to tell."""
    path = expanded(model) / "tokenizer.json"
    if not path.is_file():
        return None
    import tokenizers  # 0.1 s that `paceline --help` need not spend

    try:
        known = tokenizers.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckError(f"{path}: cannot read the tokenizer: {' '.join(str(error).split())}") from error
    return {number: token for token, number in known.items()}
