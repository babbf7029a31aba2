"""Decides how noisy a stretched model must be for a wanted acceptance, and offers stretching as a command.

    python -m models.stretch models/target OUT --hidden 1024 --layers 24 --noise 0.5
    python -m models.stretch models/target OUT --hidden 1024 --layers 24 --agreement 0.8

With `--agreement` the noise is calibrated so that the unstretched checkpoint, used as the draft, agrees that
often. How growing works is in `models.growth`.
"""

# Tensor names carry their shapes: B sequences, T tokens.
# ruff: noqa: N803
from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from alignment.losses import measure
from alignment.writing import Writer
from models.corpus import read_prompts
from models.growth import grow_to, set_noise, stretch
from models.pair import load, load_tokenizer, parameter_count, save_tokenizer

FIRST_NOISE = 2.0
PROMPT_TOKENS = 12
PROMPTS = Path(__file__).resolve().parent / "prompts.jsonl"


@dataclass(frozen=True, slots=True)
class CalibratedNoise:
    """The noise found, and the greedy acceptance measured at it."""

    noise: float
    agreement: float


def calibrate_noise(
    model: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    prompts_BT: Tensor,
    wanted: float,
    *,
    seed: int = 0,
    tokens: int = 48,
    tolerance: float = 0.02,
    steps: int = 10,
    **sizes: int | None,
) -> CalibratedNoise:
    """Find the noise at which `stretch(model, ...)` accepts a share `wanted` of the tokens `draft` would offer.

    Measured as a server would see it at temperature 0: the stretched model continues each of `prompts_BT` by
    `tokens` tokens, in its own dtype, and the draft guesses each of them. Ends within `tolerance` or after `steps`
    measurements, each the cost of writing that text once. If even the silent stretch accepts less often than
    `wanted`, that is the answer.
    """
    growth, grown = grow_to(model, **sizes), stretch(model, noise=0.0, seed=seed, **sizes)

    def agreement(noise: float) -> float:
        set_noise(grown, growth, noise, seed)
        return greedy_acceptance(grown, draft, prompts_BT, tokens)

    return bisect_noise(agreement, wanted, tolerance, steps)


def greedy_acceptance(target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts_BT: Tensor, tokens: int) -> float:
    """Share of the tokens the target writes greedily after `prompts_BT` that are the draft's first choice too."""
    end = target.config.eos_token_id
    writer = Writer(target, {end} if isinstance(end, int) else (), target.config.vocab_size)
    rows = writer.write(prompts_BT.tolist(), tokens, 0.0, seed=0)
    return measure(target, draft, rows, None, seed=0)["greedy"]


def calibration_prompts(tokenizer: PreTrainedTokenizerFast, count: int) -> Tensor:
    """prompts_BT: the first tokens of up to `count` bundled held-out prompts, cut to one length."""
    rows: list[list[int]] = [tokenizer(prompt)["input_ids"] for prompt in read_prompts(PROMPTS)]
    return torch.tensor([row[:PROMPT_TOKENS] for row in rows if len(row) >= PROMPT_TOKENS][:count])


def bisect_noise(agreement: Callable[[float], float], wanted: float, tolerance: float, steps: int) -> CalibratedNoise:
    """Search a falling function for `wanted`: double until below, then halve the interval."""
    best = CalibratedNoise(0.0, agreement(0.0))
    low, high, noise = 0.0, float("inf"), FIRST_NOISE
    for _ in tqdm(range(steps), desc="calibrate", leave=False):
        too_poor = best.noise == 0.0 and best.agreement < wanted
        if too_poor or abs(best.agreement - wanted) <= tolerance:
            break
        tried = CalibratedNoise(noise, agreement(noise))
        if abs(tried.agreement - wanted) < abs(best.agreement - wanted):
            best = tried
        low, high = (noise, high) if tried.agreement > wanted else (low, noise)
        noise = 2 * low if high == float("inf") else (low + high) / 2
    return best


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m models.stretch`."""
    parser = argparse.ArgumentParser(prog="python -m models.stretch", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("source", type=Path, help="folder of the small checkpoint")
    add("out", type=Path, help="folder to write, in bf16")
    add("--hidden", type=int, help="hidden size; multiples of the old one by a power of four are exact in bf16")
    add("--layers", type=int)
    add("--intermediate", type=int, help="MLP units (default: in proportion to the hidden size)")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--noise", type=float, default=0.0)
    amount.add_argument("--agreement", type=float, help="calibrate the noise to this acceptance instead")
    add("--prompts", type=int, default=16, help="prompts to calibrate on (%(default)s)")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    model = load(arguments.source, torch.bfloat16)
    tokenizer = load_tokenizer(arguments.source)
    sizes = {"hidden_size": arguments.hidden, "layers": arguments.layers, "intermediate_size": arguments.intermediate}
    noise = arguments.noise
    if arguments.agreement is not None:
        prompts_BT = calibration_prompts(tokenizer, arguments.prompts)
        found = calibrate_noise(model, model, prompts_BT, arguments.agreement, **sizes, seed=arguments.seed)
        tqdm.write(f"noise {found.noise:.4g} agrees on {found.agreement:.3f} of the tokens")
        noise = found.noise
    grown = stretch(model, **sizes, noise=noise, seed=arguments.seed)
    grown.save_pretrained(arguments.out)
    save_tokenizer(tokenizer, arguments.out)
    tqdm.write(f"{arguments.out}: {parameter_count(grown) / 1e6:.0f} million parameters")


if __name__ == "__main__":
    main()
