"""Decides the order of the phases that make the bundled models: tokenizer, target, drafts, evaluate, card.

    python -m models.train all --target-minutes 40 --draft-minutes 12
    python -m models.train all --device cuda --target-steps 40000 --draft-steps 20000

Each phase leaves its result in the work folder and a later one takes it from there, so a run can be
interrupted and repeated: training resumes from its last checkpoint. The draft can be trained as soon as a
target is in place.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from alignment.eagle.training import HELD_OUT, EagleTraining
from alignment.encoding import Batches, BatchesInTurn, EncodedText, Encoder, TokenIds, joined
from alignment.losses import Loss, distillation_loss, next_token_loss
from alignment.options import EagleOptions
from alignment.pair import load_stock, settings_of
from alignment.training import Trainer, TrainingPlan
from alignment.workplace import Workplace
from alignment.writing import BATCH, TEMPERATURES, Writer
from models import corpus, pair
from models.card import write_card
from models.evaluate import measure_continuations, measure_pair
from models.pair import ModelShape, load

HERE = Path(__file__).resolve().parent
PROMPTS = 40
CONTINUATION_TOKENS = 96
WRITTEN_WEIGHT = 2
HEAD_TEXT = "the corpus, and as much of the target's own"
DEFAULT_MINUTES = {"target": 40.0, "draft": 12.0}
PROMPT_TOKENS = 48
NEW_TOKENS = 160


class Pipeline:
    """The phases, over one output folder and one work folder."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._out: Path = arguments.out
        self._work: Path = arguments.work
        self._work.mkdir(parents=True, exist_ok=True)
        self._device = torch.device(arguments.device)

    @cached_property
    def _sources(self) -> corpus.Split:
        split = corpus.split_sources(corpus.read_sources(self._arguments.corpus))
        if not split.train or not split.held_out:
            raise SystemExit("the corpus is too small to be split into two parts")
        return split

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        return pair.load_tokenizer(self._work / "tokenizer")

    def _tokenizer_phase(self) -> None:
        split = self._sources
        tokenizer = corpus.train_tokenizer(split.train, pair.VOCABULARY, self._arguments.context)
        pair.save_tokenizer(tokenizer, self._work / "tokenizer")
        prompts = corpus.held_out_prompts(tokenizer, split.held_out, PROMPTS, self._arguments.seed)
        corpus.write_prompts(self._out / "prompts.jsonl", prompts)

    def _target_phase(self) -> None:
        text = corpus.encode_files(self._tokenizer(), self._sources.train)
        self._trained("target", pair.TARGET_SHAPE, self._plan("target"), text, next_token_loss)

    def _draft_phase(self) -> None:
        plan = self._plan("draft")
        teacher = load(self._out / "target", plan.dtype, plan.device)
        text = corpus.encode_files(self._tokenizer(), self._sources.train)
        text = np.concatenate([text, *[self._written(teacher, text)] * WRITTEN_WEIGHT])
        self._trained("draft", pair.DRAFT_SHAPE, plan, text, distillation_loss(teacher, self._arguments.data_weight))

    def _trained(self, name: str, shape: ModelShape, plan: TrainingPlan, text: TokenIds, loss: Loss) -> None:
        tokenizer, seed = self._tokenizer(), self._arguments.seed
        assert isinstance(tokenizer.eos_token_id, int)
        model = pair.build(shape, self._arguments.context, tokenizer.eos_token_id, seed)
        trainer = Trainer(model, plan, self._work / f"{name}.pt")
        trained = trainer.run(Batches(text, seed), loss, name)
        pair.publish(trained, tokenizer, self._out / name)
        facts = {
            "parameters": pair.parameter_count(trained),
            "steps": trainer.progress.step,
            "tokens": trainer.progress.tokens,
            "minutes": round(trainer.progress.seconds / 60, 1),
            "device": plan.device.type,
            "dtype": str(plan.dtype).removeprefix("torch."),
            "batch_tokens": plan.batch_tokens,
            "seed": seed,
        }
        self._merge_card({name: facts})

    def _eagle_phase(self) -> None:
        arguments, tokenizer = self._arguments, self._tokenizer()
        target = load_stock(os.path.relpath(self._out / "target"), arguments.dtype, arguments.device, arguments.threads)
        split = self._sources
        text, held_out = (corpus.encode_files(tokenizer, files) for files in (split.train, split.held_out))
        written = self._written(load(self._out / "target", target.dtype, target.device), text)
        options = EagleOptions(steps=arguments.eagle_steps, minutes=arguments.eagle_minutes, seed=arguments.seed)
        place = Workplace(self._out / "eagle", settings_of(options, HEAD_TEXT, target=target), resume=True)
        if place.finished is not None:
            return
        batches = BatchesInTurn((Batches(text, arguments.seed), 1), (Batches(written, arguments.seed), 1))
        apart = np.linspace(0, len(held_out) - options.sequence, HELD_OUT, dtype=int)
        rows = [EncodedText((*held_out[start : start + options.sequence].tolist(),), 0) for start in apart]
        training = EagleTraining(target, Encoder(tokenizer), options, place, lambda: False, tqdm.write)
        figures = training.fit(batches, rows)
        self._merge_card({"eagle": {"before": figures["before"], "after": figures["after"], "steps": figures["step"]}})

    def _evaluate_phase(self) -> None:
        tokenizer = self._tokenizer()
        split = self._sources
        held_out = corpus.encode_files(tokenizer, split.held_out)
        target, draft = (load(self._out / name, torch.float32, self._device) for name in ("target", "draft"))
        seed = self._arguments.seed
        prompts = [tokenizer(prompt)["input_ids"] for prompt in corpus.read_prompts(self._out / "prompts.jsonl")]
        facts = {
            "corpus": {
                "train_files": len(split.train),
                "held_out_files": len(split.held_out),
                "train_characters": sum(len(file.text) for file in split.train),
                "held_out_tokens": len(held_out),
            },
            "held_out": measure_pair(target, draft, held_out, self._arguments.context, seed),
            "continuations": measure_continuations(target, draft, prompts, CONTINUATION_TOKENS, seed),
        }
        self._merge_card(facts)

    def _written(self, teacher: LlamaForCausalLM, text: TokenIds) -> TokenIds:
        return write_text(self._work, teacher, text, self._arguments.written_tokens, self._arguments.seed)

    def _plan(self, name: str) -> TrainingPlan:
        arguments = self._arguments
        steps, minutes = (getattr(arguments, f"{name}_{unit}") for unit in ("steps", "minutes"))
        if steps is None and minutes is None:
            minutes = DEFAULT_MINUTES[name]
        return TrainingPlan(
            steps=math.inf if steps is None else steps,
            minutes=math.inf if minutes is None else minutes,
            batch_tokens=arguments.batch_tokens,
            sequence=arguments.sequence,
            long_sequence=arguments.context,
            muon_rate=arguments.muon_rate,
            adam_rate=arguments.adam_rate,
            device=self._device,
            dtype=getattr(torch, arguments.dtype),
        )

    def _merge_card(self, facts: dict[str, object]) -> None:
        path = self._out / "card.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps(known | facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")


PHASES: dict[str, Callable[[Pipeline], None]] = {
    "tokenizer": Pipeline._tokenizer_phase,
    "target": Pipeline._target_phase,
    "draft": Pipeline._draft_phase,
    "eagle": Pipeline._eagle_phase,
    "evaluate": Pipeline._evaluate_phase,
    "card": lambda pipeline: write_card(pipeline._out),
}


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m models.train`."""
    parser = argparse.ArgumentParser(prog="python -m models.train", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("phase", choices=("all", *PHASES), help="one phase, or all of them in order")
    add("--out", type=Path, default=HERE, help="where target/, draft/, prompts.jsonl, card.json and README.md go")
    add("--work", type=Path, default=HERE / ".work", help="checkpoints to resume from; delete it to start over")
    add("--corpus", type=Path, default=None, help="folder of *.py files (default: the standard library)")
    for name, minutes in DEFAULT_MINUTES.items():
        add(f"--{name}-steps", type=int, help=f"end the {name} after this many steps")
        add(f"--{name}-minutes", type=float, help=f"or after this time ({minutes:.0f} if neither is given)")
    add("--eagle-steps", type=int, default=1200, help="end the EAGLE-3 head after this many steps (%(default)s)")
    add("--eagle-minutes", type=float, default=0.0, help="or after this time (0: as long as it takes)")
    add("--written-tokens", type=int, default=350_000, help="text by the target for the draft (%(default)s)")
    add("--context", type=int, default=1024, help="longest context trained and declared (%(default)s)")
    add("--sequence", type=int, default=512, help="sequence length of the first 70%% of training (%(default)s)")
    add("--batch-tokens", type=int, default=4096, help="tokens in a step (%(default)s)")
    add("--muon-rate", type=float, default=6e-3, help="peak learning rate of the matrices (%(default)s)")
    add("--adam-rate", type=float, default=3e-3, help="peak rate of embeddings and norms (%(default)s)")
    add("--data-weight", type=float, default=0.1, help="weight of the text beside the target's logits (%(default)s)")
    add("--device", default="cpu", help="cpu or cuda (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="working precision (%(default)s)")
    add("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    add("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    pipeline = Pipeline(arguments)
    for phase in PHASES if arguments.phase == "all" else (arguments.phase,):
        PHASES[phase](pipeline)


def write_text(work: Path, model: LlamaForCausalLM, ids: TokenIds, tokens: int, seed: int) -> TokenIds:
    """At least `tokens` token ids: passages of `ids`, each continued by `model` and behind an end of text.

    Kept in the work folder: the same for all drafts.
    """
    path, end_of_text = work / "written.npy", model.config.eos_token_id
    assert isinstance(end_of_text, int)
    if not path.exists():
        generator, writer = np.random.default_rng(seed), Writer(model, {end_of_text}, pair.VOCABULARY)
        rows: list[tuple[int, ...]] = []
        with tqdm(total=tokens, desc="target writes", mininterval=5.0) as bar:
            while sum(map(len, rows)) < tokens:
                starts = generator.integers(0, len(ids) - PROMPT_TOKENS, size=BATCH)
                prompts = [ids[start : start + PROMPT_TOKENS].tolist() for start in starts]
                number = len(rows) // BATCH
                temperature = TEMPERATURES[number % len(TEMPERATURES)]
                fresh = [row.tokens for row in writer.write(prompts, NEW_TOKENS, temperature, seed + number)]
                rows += fresh
                bar.update(sum(map(len, fresh)))
        np.save(path, joined(rows, end_of_text))
    written: TokenIds = np.load(path)
    return written


if __name__ == "__main__":
    main()
