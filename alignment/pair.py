"""Loads models for training, refuses pairs that cannot be aligned, and says what a training depends on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from alignment.options import SettingsError
from engine.loading.checkpoint import STOCK, revision_of
from engine.loading.loader import load
from engine.model import Model


@dataclass(frozen=True, slots=True)
class ModelPair:
    """Two models with the same tokenizer, as transformers computes them."""

    target: Model
    draft: Model
    """In fp32."""

    @property
    def vocabulary(self) -> int:
        """Usable token ids are below this in both."""
        return min(self.target.vocabulary, self.draft.vocabulary)

    @property
    def context(self) -> int:
        """Longest sequence for both, in tokens."""
        return min(self.target.context, self.draft.context)

    @property
    def draft_module(self) -> PreTrainedModel:
        """What is trained."""
        assert isinstance(self.draft.module, PreTrainedModel)
        return self.draft.module


def load_pair(target: str, draft: str, dtype: str, device: str, threads: int) -> ModelPair:
    """Folders or hub ids; ``dtype`` is the target's. Raises ModelError, :class:`alignment.options.SettingsError`."""
    pair = ModelPair(load_stock(target, dtype, device, threads), load_stock(draft, "float32", device, threads))
    if pair.target.tokenizer_digest != pair.draft.tokenizer_digest:
        raise SettingsError(
            f"{draft}: has another tokenizer than {target} (digest {pair.draft.tokenizer_digest:016x}, not "
            f"{pair.target.tokenizer_digest:016x}): it can draft, but not be aligned; give a draft with the same one"
        )
    pair.draft_module.requires_grad_(True)
    return pair


def load_stock(path: str, dtype: str, device: str, threads: int) -> Model:
    """A model as transformers computes it, which has gradients. Raises as :func:`load_pair`."""
    model = load(path, dtype=dtype, device=device, threads=threads, pack=False, self_test=False, by_rows=False)
    if not model.tokenizer_digest:
        raise SettingsError(f"{path}: has no tokenizer; training needs it to read the data")
    module: Any = model.module
    module.set_attn_implementation("sdpa" if module._supports_sdpa else STOCK)
    return model


def settings_of(options: Any, data: object, **models: Model) -> dict[str, Any]:
    """All that a training with ``options`` depends on, as plain values; ``models``: by role, a target among them."""
    target = models["target"]
    named = {role: f"{model.name} ({revision_of(model.name, str(model.dtype)):016x})" for role, model in models.items()}
    machine = {"device": target.device.type, "dtype": str(target.dtype).removeprefix("torch.")}
    return asdict(options) | named | machine | {"data": str(data)}
