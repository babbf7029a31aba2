"""Decides how the bundled draft with a tokenizer of its own is made.

    python -m models.other_draft --steps 400

The tokenizer splits text otherwise than the target's (single digits, punctuation with what follows it) and is smaller,
so that many tokens of each are none of the other's. The model starts as the bundled draft: its layers, and of its
embeddings those of the tokens both have; any other token starts as the mean of the bundled draft's tokens for the same
text. It then learns from the corpus and, more, from what the target wrote. That is text: logits cannot be distilled
from one vocabulary into another.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from alignment.encoding import Batches
from alignment.losses import next_token_loss
from alignment.training import Trainer, TrainingPlan
from engine.model import placed
from models.corpus import END_OF_TEXT, SourceFile, encode_files, learn_tokenizer, read_sources, split_sources
from models.pair import load, load_tokenizer, parameter_count, publish
from models.train import write_text

HERE = Path(__file__).resolve().parent
VOCABULARY = 3000
PADDED_VOCABULARY = 3072
SPECIAL_TOKENS = ("<s>", "</s>")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How large models of today cut text before they merge; the target's tokenizer cuts as GPT-2's."""
WRITTEN_TOKENS = 350_000
WRITTEN_WEIGHT = 8


def other_tokenizer(files: Sequence[SourceFile], context: int) -> PreTrainedTokenizerFast:
    """One of :data:`VOCABULARY` ids over :data:`SPLIT`, its special tokens named otherwise, too."""
    bytes_of_parts = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    parts = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), bytes_of_parts])
    beginning, end = SPECIAL_TOKENS
    names = {"bos_token": beginning, "eos_token": end, "pad_token": end}
    return learn_tokenizer(files, VOCABULARY, SPECIAL_TOKENS, parts, **names, model_max_length=context)


@torch.no_grad()
def transplant(model: LlamaForCausalLM, old: PreTrainedTokenizerFast, new: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A copy of ``model``, with embeddings for the tokens of ``new``."""
    ids = {"bos_token_id": new.bos_token_id, "eos_token_id": new.eos_token_id, "pad_token_id": new.pad_token_id}
    config = LlamaConfig(**(model.config.to_dict() | ids | {"vocab_size": PADDED_VOCABULARY}))
    copy = placed(LlamaForCausalLM(config), torch.float32)
    layers = {
        name: value for name, value in model.state_dict().items() if "embed" not in name and "lm_head" not in name
    }
    copy.load_state_dict(layers, strict=False)
    known = model.get_input_embeddings().weight
    rows = copy.get_input_embeddings().weight
    assert isinstance(known, torch.Tensor) and isinstance(rows, torch.Tensor)
    special = dict.fromkeys(new.all_special_ids, old.eos_token_id)
    for token in range(VOCABULARY):
        parts = (
            [special[token]] if token in special else old(new.decode([token]), add_special_tokens=False)["input_ids"]
        )
        rows[token] = known[parts].mean(0) if parts else known.mean(0)
    return copy


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m models.other_draft`."""
    parser = argparse.ArgumentParser(prog="python -m models.other_draft", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--out", type=Path, default=HERE / "draft_other", help="folder of the model (%(default)s)")
    add("--work", type=Path, default=HERE / ".work", help="checkpoint to resume from, and what the target wrote")
    add("--steps", type=int, default=400, help="of 4096 tokens (%(default)s)")
    add("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    add("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    files = split_sources(read_sources()).train
    draft, old = load(HERE / "draft", torch.float32), load_tokenizer(HERE / "target")
    tokenizer = other_tokenizer(files, draft.config.max_position_embeddings)
    target, corpus = load(HERE / "target", torch.bfloat16), encode_files(old, files)
    written = write_text(arguments.work, target, corpus, WRITTEN_TOKENS, arguments.seed)
    passages = filter(None, str(old.decode(written.tolist())).split(END_OF_TEXT))
    told = [SourceFile(str(number), passage) for number, passage in enumerate(passages)]
    text = np.concatenate([encode_files(tokenizer, files), *[encode_files(tokenizer, told)] * WRITTEN_WEIGHT])
    plan = TrainingPlan(
        steps=arguments.steps,
        batch_tokens=4096,
        sequence=512,
        long_sequence=1024,
        muon_rate=3e-3,
        adam_rate=2e-3,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
    )
    trainer = Trainer(transplant(draft, old, tokenizer), plan, arguments.work / "draft_other.pt")
    trained = trainer.run(Batches(text, arguments.seed), next_token_loss, "other draft")
    publish(trained, tokenizer, arguments.out)
    facts = {
        "command": f"python -m models.other_draft --steps {arguments.steps} --seed {arguments.seed}",
        "parameters": parameter_count(trained),
        "tokens": trainer.progress.tokens,
        "minutes": round(trainer.progress.seconds / 60, 1),
        "loss": round(trainer.progress.recent_loss, 3),
    }
    (arguments.out / "made.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
