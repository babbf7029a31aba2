"""Fills the model card: the words are in `card_template.md`, every figure comes from `card.json`.

Only measurements write `card.json`.

python -m models.train card
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from string import Template
from typing import Any

Facts = Mapping[str, Any]

TEMPLATE = Path(__file__).resolve().with_name("card_template.md")
SIZES: Mapping[str, Callable[[Any], object]] = {
    "hidden size": itemgetter("hidden_size"),
    "layers": itemgetter("num_hidden_layers"),
    "heads / kv heads": lambda config: f"{config['num_attention_heads']} / {config['num_key_value_heads']}",
    "MLP units": itemgetter("intermediate_size"),
    "context": itemgetter("max_position_embeddings"),
}
SPENT: Mapping[str, Callable[[Any], object]] = {
    "steps": itemgetter("steps"),
    "tokens": lambda model: f"{model['tokens'] / 1e6:.1f} million",
    "minutes in steps": lambda model: f"{model['minutes']:.0f} on {model['device']}",
    "working precision": itemgetter("dtype"),
}
FIT: Mapping[str, Callable[[Any], object]] = {
    "cross-entropy, nats per token": lambda fit: f"{fit['nats']:.3f}",
    "the same by quarter of the context": lambda fit: ", ".join(
        f"{nats:.2f}" for nats in fit["nats_by_quarter_of_context"]
    ),
    "top-1": lambda fit: _percent(fit["top1"]),
}


def _table(rows: Iterable[Iterable[object]]) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _rows(models: Iterable[Facts], figures: Mapping[str, Callable[[Any], object]]) -> str:
    """A line for each figure, a column for each model."""
    models = list(models)
    return _table((name, *map(figure, models)) for name, figure in figures.items())


def _acceptance_rows(facts: Facts) -> str:
    texts = {
        "held-out files": facts["held_out"]["acceptance"],
        "what the target writes greedily": facts["continuations"]["greedy_text"],
        "what the target samples at 0.8": facts["continuations"]["sampled_text"],
    }
    readings = ("greedy", "coupled", "overlap")
    return _table((title, *(_percent(rates[name]) for name in readings)) for title, rates in texts.items())


def _head_rows(head: Facts) -> str:
    shares = zip(head["before"]["by_head"], head["after"]["by_head"], strict=True)
    return _table((f"+{guess + 1}", *map(_percent, both)) for guess, both in enumerate(shares))


def write_card(out: Path) -> None:
    """Write `out/README.md` from `out/card.json` and the two model configurations."""
    facts = json.loads((out / "card.json").read_text(encoding="utf-8"))
    pair, names = [facts["target"], facts["draft"]], ("target", "draft")
    configs = [json.loads((out / name / "config.json").read_text(encoding="utf-8")) for name in names]
    corpus, target, eagle = facts["corpus"], facts["target"], facts["eagle"]
    text = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        models=_rows(pair, {"parameters": lambda model: f"{model['parameters'] / 1e6:.2f} million"})
        + "\n"
        + _rows(configs, SIZES),
        training=_rows(pair, SPENT),
        fit=_rows((facts["held_out"][name] for name in names), FIT),
        acceptance=_acceptance_rows(facts),
        command=f"python -m models.train all --target-steps {target['steps']} --draft-steps {facts['draft']['steps']} "
        f"--batch-tokens {target['batch_tokens']} \\\n    --device {target['device']} "
        f"--dtype {target['dtype']} --seed {target['seed']}",
        train_files=corpus["train_files"],
        train_megabytes=f"{corpus['train_characters'] / 1e6:.1f}",
        held_out_files=corpus["held_out_files"],
        held_out_tokens=corpus["held_out_tokens"],
        eagle=_head_rows(eagle),
        eagle_steps=eagle["steps"],
        # What it had learned before the steps that the table is about.
        eagle_first=f" behind {eagle['first_steps']} with fewer guesses" if "first_steps" in eagle else "",
        eagle_depth=len(eagle["after"]["by_head"]),
        eagle_before=f"{eagle['before']['run']:.2f}",
        eagle_after=f"{eagle['after']['run']:.2f}",
    )
    (out / "README.md").write_text(text, encoding="utf-8")
