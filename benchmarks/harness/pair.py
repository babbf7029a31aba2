"""The pair the benchmarks run: a stretched target and, as its draft, the checkpoint it was stretched from.

Stretching (``models.stretch``) gives the bundled target the cost of a model many times its size without changing what
it says; noise in the added layers then sets how often the draft agrees. So the ratio of step costs and the acceptance
are those of a real pair, and no download is needed. What is built is kept in a folder that git ignores.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

from cluster.config.environment import CHECKOUT
from engine.eagle import loading as eagle
from models.corpus import read_prompts
from models.growth import grow_to, stretch, stretch_eagle
from models.pair import VOCABULARY, load, load_tokenizer, parameter_count, save_tokenizer
from models.stretch import calibrate_noise, calibration_prompts

ROOT = CHECKOUT
BUNDLED = ROOT / "models" / "target"
DRAFT = ROOT / "models" / "draft"
EAGLE = ROOT / "models" / "eagle"
CACHE = ROOT / "benchmarks" / ".cache"
SEED = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the target becomes, and how often the draft shall agree with it."""

    hidden: int = 1024
    layers: int = 24
    """So that a step of the draft costs about a twelfth of a step of the target, as 1B does to 70B."""
    acceptance: float = 0.8


@dataclass(frozen=True, slots=True)
class Pair:
    """Two model folders."""

    name: str
    target: Path
    draft: Path
    parameters: int
    about: str
    agreement: float | None = None
    """How often the draft is right greedily, as measured when the pair was built; None: it was not."""


def trained_pair() -> Pair:
    """The bundled target and draft, as they are."""
    parameters = parameter_count(load(BUNDLED, torch.bfloat16))
    about = f"Target ({parameters / 1e6:.1f}M parameters) and draft: the bundled pair, as trained."
    return Pair("trained", BUNDLED, DRAFT, parameters, about)


def stretched_pair(shape: Shape, device: torch.device | None = None) -> Pair:
    """Build the pair on a device (default: the CPU), or find it as built before from the same bundled checkpoint."""

    def build(fresh: Path) -> None:
        draft, tokenizer = load(BUNDLED, torch.bfloat16, device), load_tokenizer(BUNDLED)
        size = {"hidden_size": shape.hidden, "layers": shape.layers}
        prompts = calibration_prompts(tokenizer, 12)
        found = calibrate_noise(draft, draft, prompts, shape.acceptance, seed=SEED, tokens=32, **size)
        target = stretch(draft, noise=found.noise, seed=SEED, **size)
        target.save_pretrained(fresh)
        save_tokenizer(tokenizer, fresh)
        known = {"shape": asdict(shape), "parameters": parameter_count(target), **asdict(found)}
        (fresh / "pair.json").write_text(json.dumps(known))

    folder = _once(f"{_checkpoint(BUNDLED)}-h{shape.hidden}-l{shape.layers}-a{shape.acceptance:.2f}", build)
    known = json.loads((folder / "pair.json").read_text())
    about = (
        f"Target: the bundled model stretched to {known['parameters'] / 1e6:.0f}M parameters, "
        f"noise {known['noise']:.3g}. "
        f"Draft: the bundled target, unstretched; it agrees greedily on {known['agreement']:.2f} of the tokens. "
        "The cost is real, the agreement is set."
    )
    return Pair(f"stretched {shape.acceptance:g}", folder, BUNDLED, known["parameters"], about, known["agreement"])


def held_out(count: int | None = None) -> list[tuple[int, ...]]:
    """So many prompts (default: all) that no bundled model was trained on, in tokens of theirs."""
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    texts = read_prompts(ROOT / "models" / "prompts.jsonl")[:count]
    return [tuple(tokenizer.encode(text).ids) for text in texts]


def noiseless_target(hidden: int, layers: int, device: torch.device | None = None) -> Path:
    """A target that says what the bundled one says, at several times its cost; built on a device (default: the CPU)."""

    def build(fresh: Path) -> None:
        bundled = load(BUNDLED, torch.bfloat16, device)
        stretch(bundled, hidden_size=hidden, layers=layers, seed=SEED).save_pretrained(fresh)
        save_tokenizer(load_tokenizer(BUNDLED), fresh)

    return _once(f"{_checkpoint(BUNDLED)}-h{hidden}-l{layers}-silent", build)


def stretched_eagle(shape: Shape) -> Path:
    """The bundled EAGLE-3 head for the stretched target of this shape; it drafts what it does for the bundled one."""

    def build(fresh: Path) -> None:
        target = load(BUNDLED, torch.bfloat16)
        head = eagle.read(EAGLE, lambda _: target.model.embed_tokens.weight)
        eagle.save(stretch_eagle(head, grow_to(target, shape.hidden, shape.layers)), fresh, embedding=True)

    return _once(f"{_checkpoint(EAGLE)}-eagle-h{shape.hidden}-l{shape.layers}", build)


def wrong_draft(pair: Pair) -> Path:
    """A copy of the pair's draft that costs the same and is always wrong.

    It reads as the draft does and then says another token: the rows of its output layer have changed places, so that
    none of the vocabulary stays where it was.
    """

    def build(fresh: Path) -> None:
        model = load(pair.draft, torch.bfloat16)
        rows_VD = model.lm_head.weight.detach().clone()
        rows_VD[:VOCABULARY] = rows_VD[:VOCABULARY].roll(VOCABULARY // 2, dims=0)
        model.config.tie_word_embeddings = False
        model.lm_head.weight = nn.Parameter(rows_VD)
        model.save_pretrained(fresh)
        save_tokenizer(load_tokenizer(pair.draft), fresh)

    return _once(f"{_checkpoint(pair.draft)}-wrong", build)


def _checkpoint(folder: Path) -> str:
    return sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:8]


def _once(name: str, build: Callable[[Path], None]) -> Path:
    """The folder of that name, built unless it is there; half of one is never taken for all of it."""
    folder, fresh = CACHE / name, CACHE / f".{name}.new"
    if not folder.exists():
        shutil.rmtree(fresh, ignore_errors=True)
        build(fresh)
        fresh.rename(folder)
    return folder
