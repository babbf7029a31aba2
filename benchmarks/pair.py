"""The pair the benchmarks run: a stretched target and, as its draft, the checkpoint it was stretched from.

Stretching (``models.stretch``) gives the bundled target the cost of a model many times its size without changing what
it says; noise in the added layers then sets how often the draft agrees. So the ratio of step costs and the acceptance
are those of a real pair, and no download is needed. The result is kept in a folder that git ignores.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import torch

from models.pair import load, load_tokenizer, parameter_count, save_tokenizer
from models.stretch import calibrate_noise, calibration_prompts, stretch

ROOT = Path(__file__).parent.parent
BUNDLED = ROOT / "models" / "target"
CACHE = ROOT / "benchmarks" / ".cache"
SEED = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the target becomes, and how often the draft shall agree with it."""

    hidden: int = 1024
    layers: int = 32
    acceptance: float = 0.8


@dataclass(frozen=True, slots=True)
class Pair:
    """Two model folders."""

    target: Path
    draft: Path
    parameters: int
    about: str
    """What a reader of the figures must know."""


def trained_pair() -> Pair:
    """The bundled target and draft, as they are."""
    parameters = parameter_count(load(BUNDLED, torch.bfloat16))
    return Pair(BUNDLED, ROOT / "models" / "draft", parameters, "Target and draft: the bundled pair, as trained.")


def stretched_pair(shape: Shape) -> Pair:
    """Build the pair, or find it as built before from the same bundled checkpoint."""
    checkpoint = sha256((BUNDLED / "model.safetensors").read_bytes()).hexdigest()[:8]
    folder = CACHE / f"{checkpoint}-h{shape.hidden}-l{shape.layers}-a{shape.acceptance:.2f}"
    record = folder / "pair.json"
    if not record.exists():
        _build(shape, folder, record)
    known = json.loads(record.read_text())
    about = (
        f"Target: the bundled model stretched to {known['parameters'] / 1e6:.0f}M parameters, "
        f"noise {known['noise']:.3g}. "
        f"Draft: the bundled target, unstretched; it agrees greedily on {known['agreement']:.2f} of the tokens. "
        "The cost is real, the agreement is set."
    )
    return Pair(folder, BUNDLED, known["parameters"], about)


def _build(shape: Shape, folder: Path, record: Path) -> None:
    draft, tokenizer = load(BUNDLED, torch.bfloat16), load_tokenizer(BUNDLED)
    size = {"hidden_size": shape.hidden, "layers": shape.layers}
    found = calibrate_noise(
        draft, draft, calibration_prompts(tokenizer, 12), shape.acceptance, seed=SEED, tokens=32, **size
    )
    target = stretch(draft, noise=found.noise, seed=SEED, **size)
    target.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    record.write_text(json.dumps({"shape": asdict(shape), "parameters": parameter_count(target), **asdict(found)}))
