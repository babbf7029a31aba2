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


def _row(title: str, *values: object) -> str:
    return "| " + " | ".join([title, *map(str, values)]) + " |"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _pair_rows(facts: Facts, rows: Iterable[tuple[str, Any]]) -> str:
    return "\n".join(_row(title, *(show(facts[name]) for name in ("target", "draft"))) for title, show in rows)


def _model_rows(facts: Facts) -> str:
    return _pair_rows(
        facts,
        [
            ("parameters", lambda model: f"{model['parameters'] / 1e6:.2f} million"),
            ("hidden size", lambda model: model["config"]["hidden_size"]),
            ("layers", lambda model: model["config"]["num_hidden_layers"]),
            (
                "heads / kv heads",
                lambda model: f"{model['config']['num_attention_heads']} / {model['config']['num_key_value_heads']}",
            ),
            ("MLP units", lambda model: model["config"]["intermediate_size"]),
            ("context", lambda model: model["config"]["max_position_embeddings"]),
        ],
    )


def _training_rows(facts: Facts) -> str:
    return _pair_rows(
        facts,
        [
            ("steps", lambda model: model["steps"]),
            ("tokens", lambda model: f"{model['tokens'] / 1e6:.1f} million"),
            ("minutes in steps", lambda model: f"{model['minutes']:.0f} on {model['device']}"),
            ("working precision", lambda model: model["dtype"]),
        ],
    )


def _fit_rows(held_out: Facts) -> str:
    quarters = "nats_by_quarter_of_context"
    return _pair_rows(
        held_out,
        [
            ("cross-entropy, nats per token", lambda fit: f"{fit['nats']:.3f}"),
            (
                "the same by quarter of the context",
                lambda fit: ", ".join(f"{nats:.2f}" for nats in fit[quarters]),
            ),
            ("top-1", lambda fit: _percent(fit["top1"])),
        ],
    )


def _acceptance_rows(facts: Facts) -> str:
    texts = {
        "held-out files": facts["held_out"]["acceptance"],
        "what the target writes greedily": facts["continuations"]["greedy_text"],
        "what the target samples at 0.8": facts["continuations"]["sampled_text"],
    }
    return "\n".join(
        _row(title, *(_percent(rates[key]) for key in ("greedy", "coupled", "overlap")))
        for title, rates in texts.items()
    )


def _heads_rows(heads: Facts) -> str:
    shares = zip(heads["before"]["by_head"], heads["after"]["by_head"], strict=True)
    return "\n".join(_row(f"+{head + 1}", *map(_percent, both)) for head, both in enumerate(shares))


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
