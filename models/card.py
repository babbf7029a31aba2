"""Fills the model card: the words are in `card_template.md`, every figure comes from `card.json`.

Only measurements write `card.json`.

python -m models.train card
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template
from typing import Any

Facts = Mapping[str, Any]

TEMPLATE = Path(__file__).resolve().with_name("card_template.md")


def _table(rows: Iterable[Iterable[object]]) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _model_rows(facts: Facts) -> str:
    pair = [facts["target"], facts["draft"]]
    configs = [model["config"] for model in pair]
    heads = [f"{config['num_attention_heads']} / {config['num_key_value_heads']}" for config in configs]
    return _table(
        [
            ("parameters", *(f"{model['parameters'] / 1e6:.2f} million" for model in pair)),
            ("hidden size", *(config["hidden_size"] for config in configs)),
            ("layers", *(config["num_hidden_layers"] for config in configs)),
            ("heads / kv heads", *heads),
            ("MLP units", *(config["intermediate_size"] for config in configs)),
            ("context", *(config["max_position_embeddings"] for config in configs)),
        ]
    )


def _training_rows(facts: Facts) -> str:
    pair = [facts["target"], facts["draft"]]
    return _table(
        [
            ("steps", *(model["steps"] for model in pair)),
            ("tokens", *(f"{model['tokens'] / 1e6:.1f} million" for model in pair)),
            ("minutes in steps", *(f"{model['minutes']:.0f} on {model['device']}" for model in pair)),
            ("working precision", *(model["dtype"] for model in pair)),
        ]
    )


def _fit_rows(held_out: Facts) -> str:
    fits = [held_out["target"], held_out["draft"]]
    quarters = [", ".join(f"{nats:.2f}" for nats in fit["nats_by_quarter_of_context"]) for fit in fits]
    return _table(
        [
            ("cross-entropy, nats per token", *(f"{fit['nats']:.3f}" for fit in fits)),
            ("the same by quarter of the context", *quarters),
            ("top-1", *(_percent(fit["top1"]) for fit in fits)),
        ]
    )


def _acceptance_rows(facts: Facts) -> str:
    texts = {
        "held-out files": facts["held_out"]["acceptance"],
        "what the target writes greedily": facts["continuations"]["greedy_text"],
        "what the target samples at 0.8": facts["continuations"]["sampled_text"],
    }
    readings = ("greedy", "coupled", "overlap")
    return _table((title, *(_percent(rates[name]) for name in readings)) for title, rates in texts.items())


def _heads_rows(heads: Facts) -> str:
    shares = zip(heads["before"]["by_head"], heads["after"]["by_head"], strict=True)
    return _table((f"+{head + 1}", *map(_percent, both)) for head, both in enumerate(shares))


def _begun_with(head: Facts) -> str:
    """What a head had learned before the steps that the table is about, if anything."""
    return f" behind {head['first_steps']} with fewer guesses" if "first_steps" in head else ""


def _command(facts: Facts) -> str:
    target, draft = facts["target"], facts["draft"]
    return (
        f"python -m models.train all --target-steps {target['steps']} --draft-steps {draft['steps']} "
        f"--batch-tokens {target['batch_tokens']} \\\n    --device {target['device']} "
        f"--dtype {target['dtype']} --seed {target['seed']}"
    )


def write_card(out: Path) -> None:
    """Write `out/README.md` from `out/card.json` and the two model configurations."""
    facts = json.loads((out / "card.json").read_text(encoding="utf-8"))
    for name in ("target", "draft"):
        facts[name]["config"] = json.loads((out / name / "config.json").read_text(encoding="utf-8"))
    corpus = facts["corpus"]
    text = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        models=_model_rows(facts),
        training=_training_rows(facts),
        fit=_fit_rows(facts["held_out"]),
        acceptance=_acceptance_rows(facts),
        command=_command(facts),
        train_files=corpus["train_files"],
        train_megabytes=f"{corpus['train_characters'] / 1e6:.1f}",
        held_out_files=corpus["held_out_files"],
        held_out_tokens=corpus["held_out_tokens"],
        medusa=_heads_rows(facts["medusa"]),
        medusa_steps=facts["medusa"]["steps"],
        heads=len(facts["medusa"]["after"]["by_head"]),
        run_before=f"{facts['medusa']['before']['run']:.2f}",
        run_after=f"{facts['medusa']['after']['run']:.2f}",
        eagle=_heads_rows(facts["eagle"]),
        eagle_steps=facts["eagle"]["steps"],
        eagle_first=_begun_with(facts["eagle"]),
        eagle_depth=len(facts["eagle"]["after"]["by_head"]),
        eagle_before=f"{facts['eagle']['before']['run']:.2f}",
        eagle_after=f"{facts['eagle']['after']['run']:.2f}",
    )
    (out / "README.md").write_text(text, encoding="utf-8")
