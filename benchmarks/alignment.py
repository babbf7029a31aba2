"""How much ``paceline align draft`` does for a draft that was trained on other text.

    python -m benchmarks.alignment
    python -m benchmarks.alignment --draft bundled

A draft of the bundled shape learns English first: the descriptions of the installed packages. Then it is aligned with
the bundled target, on the target's own samples and the Python that it was trained on. Acceptance is measured on files
which neither model ever saw. In minutes on one core; ``bundled`` aligns the bundled draft instead.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from alignment.acceptance import measure
from alignment.batches import Batches
from alignment.data import find_data
from alignment.distillation import Distillation, DistillationOptions, settings_of
from alignment.encoding import Encoder, tokenizer_of
from alignment.losses import OBJECTIVES, next_token_loss
from alignment.pair import ModelPair, load_pair
from alignment.training import Trainer, TrainingPlan
from alignment.workplace import Workplace
from alignment.writing import Writer, WrittenRow
from benchmarks.harness.pair import ROOT
from cluster.console import say
from models.corpus import SourceFile, encode_files, read_prompts, read_sources, split_sources
from models.pair import DRAFT_SHAPE, VOCABULARY, build, load, load_tokenizer, publish

TARGET, BUNDLED = ROOT / "models" / "target", ROOT / "models" / "draft"
CONTEXT = 1024
NEW_TOKENS = 96
TEMPERATURES = (0.0, 0.8, 1.0)
READINGS = ("greedy", "coupled", "overlap")
SEED = 0


def other_text() -> list[SourceFile]:
    """What packages say of themselves: English in Markdown, and hardly any code."""
    found = sorted(Path(sysconfig.get_paths()["purelib"]).glob("*.dist-info/METADATA"))
    return [SourceFile(path.parent.name, path.read_text("utf-8", "replace")) for path in found]


def draft_of_other_text(tokenizer: PreTrainedTokenizerFast, steps: int, folder: Path) -> Path:
    """A checkpoint of the bundled draft's shape, trained on :func:`other_text`."""
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    plan = TrainingPlan(
        steps=steps,
        minutes=math.inf,
        batch_tokens=4096,
        sequence=512,
        long_sequence=512,
        muon_rate=6e-3,
        adam_rate=3e-3,
        seed=SEED,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
    )
    trainer = Trainer(build(DRAFT_SHAPE, CONTEXT, end, SEED), plan, folder / "other.pt")
    batches = Batches(encode_files(tokenizer, other_text()), SEED)
    publish(trainer.run(batches, next_token_loss, "other text"), tokenizer, folder / "other")
    return folder / "other"


def written(target: ModelPair) -> dict[str, list[WrittenRow]]:
    """What the target writes after prompts from files that it never saw."""
    tokenizer = load_tokenizer(TARGET)
    prompts = [tokenizer(text)["input_ids"] for text in read_prompts(ROOT / "models" / "prompts.jsonl")]
    writer = Writer(target.target.module, target.target.stop_tokens)
    return {
        f"written at {temperature:g}": writer.write(prompts, NEW_TOKENS, temperature, SEED)
        for temperature in TEMPERATURES
    }


def held_out_files(tokenizer: PreTrainedTokenizerFast, files: Sequence[SourceFile]) -> list[WrittenRow]:
    """The beginnings of the files that neither model was trained on."""
    return [WrittenRow(tuple(encode_files(tokenizer, [file])[:CONTEXT].tolist()), 0, 1.0) for file in files[:24]]


def acceptance(
    pair: ModelPair, draft: LlamaForCausalLM, texts: dict[str, list[WrittenRow]]
) -> dict[str, dict[str, float]]:
    """By kind of text."""
    return {name: measure(pair.target.module, draft, rows, VOCABULARY, SEED) for name, rows in texts.items()}


def main(arguments: argparse.Namespace) -> None:
    """Train, align, measure and print."""
    torch.set_num_threads(arguments.threads)
    tokenizer = load_tokenizer(TARGET)
    split = split_sources(read_sources())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundled = arguments.draft == "bundled"
        draft = BUNDLED if bundled else draft_of_other_text(tokenizer, arguments.other_steps, folder)
        texts = folder / "texts"
        for file in split.train:
            path = texts / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text, "utf-8")
        options = DistillationOptions(
            objective=arguments.objective, steps=arguments.steps, rate=arguments.rate, seed=SEED
        )
        pair = load_pair(str(TARGET), str(draft), "bf16", "cpu", arguments.threads)
        data = find_data([texts])
        held_out = written(pair) | {"held-out files": held_out_files(tokenizer, split.held_out)}
        before = acceptance(pair, load(draft, torch.bfloat16), held_out)
        place = Workplace(folder / "aligned", settings_of(options, pair, data), resume=True)
        outcome = Distillation(pair, Encoder(tokenizer_of(str(TARGET))), options, place, lambda: False, say).run(data)
        after = acceptance(pair, load(place.out, torch.bfloat16), held_out)
    say(f"{arguments.draft} draft, {options.objective}, {outcome.steps} steps, the best of them {outcome.best_step}")
    say(f"{'':20} " + " ".join(f"{reading:>18}" for reading in READINGS))
    for kind in held_out:
        cells = (f"{before[kind][reading]:.3f} -> {after[kind][reading]:.3f}" for reading in READINGS)
        say(f"{kind:20} " + " ".join(f"{cell:>18}" for cell in cells))
    if arguments.json:
        figures = {"draft": arguments.draft, "before": before, "after": after, "history": outcome.history}
        arguments.json.write_text(json.dumps(figures | {"objective": options.objective}, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="acceptance before and after alignment")
    add = parser.add_argument
    add("--draft", choices=("other", "bundled"), default="other", help="trained on other text, or the bundled one")
    add("--objective", choices=tuple(OBJECTIVES), default="forward-kl", help="(default: %(default)s)")
    add("--steps", type=int, default=200, help="of the alignment (default: %(default)s)")
    add("--other-steps", type=int, default=200, help="of learning other text (default: %(default)s)")
    add("--rate", type=float, default=0.0, help="peak learning rate (default: that of the command)")
    add("--threads", type=int, default=1, help="(default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    main(parser.parse_args())
