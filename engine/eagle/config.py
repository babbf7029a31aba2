"""What the config.json of an EAGLE-3 checkpoint says of its head.

Read are the layouts that are published: the authors' (``LlamaForCausalLMEagle3``, also SpecForge's and SGLang's),
vLLM's name for it (``Eagle3LlamaForCausalLM``), and that of the speculators library (``Eagle3DraftModel``, its layer
described in ``transformer_layer_config``). Anything else is refused by what it is, since a head of another kind would
run and have nothing accepted. Numbers only: which tensors there are is :mod:`engine.eagle.loading`'s part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.model import ModelError, first_line, layers_of

CONFIG = "config.json"
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator")
SPECULATORS = "transformer_layer_config"
AUX = "eagle_aux_hidden_state_layer_ids"
MAX_SIZE, MAX_LAYERS, MAX_AUX = 1 << 24, 16, 16

Plain = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """The shape of a head, and of the target it is for, in the words of config.json."""

    hidden_size: int
    """Of the head's states, and of the embeddings it reads."""
    target_hidden_size: int
    vocab_size: int
    """The target's."""
    draft_vocab_size: int
    """Tokens the head can say."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: Plain
    """As transformers knows it: ``rope_type``, ``rope_theta`` and what else the type takes."""
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_before_residual: bool = False
    """Whether the first layer adds to the state behind ``hidden_norm``, not to the one before."""
    norm_before_fc: bool = False
    """Whether one norm comes before fc, over all auxiliary states in a row."""
    fc_norm: bool = False
    """Whether each auxiliary state has a norm of its own there."""
    norm_output: bool = False
    """Whether the head reads on from its state behind the final norm, not from the one before."""
    tie_word_embeddings: bool = False
    aux_layers: tuple[int, ...] = ()
    """See :meth:`aux_layers_of`; empty: the default."""

    def aux_layers_of(self, target_layers: int) -> tuple[int, ...]:
        """Which hidden states of a target with so many layers the head reads, as transformers counts them.

        State i is what layer i reads, that is, layer i - 1's output with its residual; 0 is the embedding, and the
        number of layers stands for the last output, before the final norm. Raises ModelError for one it has not.
        """
        wanted = self.aux_layers or (2, target_layers // 2, target_layers - 3)
        if not all(0 <= layer <= target_layers for layer in wanted):
            told = "its config.json names" if self.aux_layers else "an EAGLE-3 head without a list of its own reads"
            raise ModelError(
                f"this head is for another target: {told} the hidden states {list(wanted)}, this target has 0 to "
                f"{target_layers}"
            )
        return wanted

    @property
    def aux_states(self) -> int:
        """How many hidden states of a token fc reads."""
        return len(self.aux_layers) or 3

    def llama(self) -> LlamaConfig:
        """The same for transformers, as far as positions go."""
        rope = dict(self.rope_parameters)
        return _llama(self.num_attention_heads, self.head_dim, self.max_position_embeddings, rope_parameters=rope)

    @classmethod
    def beside(cls, target: Any, **others: Any) -> EagleConfig:
        """Of a head shaped as the first layer of ``target``, a text configuration, but for what ``others`` say."""
        target = layers_of(target)[0]
        heads = target.num_attention_heads
        shape = {
            "hidden_size": target.hidden_size,
            "target_hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": target.vocab_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
            "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
            "intermediate_size": target.intermediate_size,
            "rms_norm_eps": getattr(target, "rms_norm_eps", None) or 1e-6,
            "max_position_embeddings": target.max_position_embeddings,
        }
        return cls(**(shape | others))

    def plain(self) -> dict[str, Any]:
        """What config.json holds, in the authors' layout."""
        said = {"architectures": [ARCHITECTURES[0]], "model_type": "llama", **asdict(self)}
        said[AUX] = list(said.pop("aux_layers")) or None
        return said | {"rope_theta": self.rope_parameters.get("rope_theta")}

    @classmethod
    def from_folder(cls, folder: Path) -> EagleConfig:
        """What the checkpoint in ``folder`` says. Raises :class:`engine.model.ModelError`, with the kind it is of."""
        if not folder.is_dir():
            raise ModelError(f"{folder}: no such folder; give the one of an EAGLE-3 head, with its {CONFIG}")
        file, said = folder / CONFIG, _read(folder)
        if not isinstance(said, dict):
            raise ModelError(f"{file}: must hold an object, got {type(said).__name__}")
        _check_kind(folder, said)
        return _Reader(file, said).config()


def _read(folder: Path) -> Any:
    file = folder / CONFIG
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder}: not an EAGLE-3 head, it has no {CONFIG}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: cannot be read: {first_line(error)}") from error


def _llama(heads: int, head_size: int, positions: int, **rope: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {"hidden_size": heads * head_size, "num_attention_heads": heads, "head_dim": head_size}
    return LlamaConfig(**sizes, max_position_embeddings=positions, **rope)


def _check_kind(folder: Path, said: Plain) -> None:
    named = said.get("architectures") or []
    names = [str(name) for name in named] if isinstance(named, list) else [str(named)]
    lower = " ".join([*names, str(said.get("model_type")), str(said.get("speculators_model_type"))]).lower()
    if "medusa_num_heads" in said or "medusa" in lower:
        kind, right = "Medusa heads", "train one in their place: paceline align eagle"
    elif said.get("speculators_model_type") == "eagle3" or set(names) & set(ARCHITECTURES):
        return
    elif "eagle3" in lower:
        kind, right = f"an EAGLE-3 head of another family ({', '.join(names)})", f"known are {', '.join(ARCHITECTURES)}"
    elif "eagle" in lower:
        kind, right = "an EAGLE-1 or EAGLE-2 head", "give one that was trained as EAGLE-3"
    elif any(word in lower for word in ("dflash", "mtp", "nextn", "hydra", "mlp_speculator", "mlpspeculator")):
        kind, right = f"another drafter ({', '.join(names) or lower})", "give an EAGLE-3 head"
    elif "draft_vocab_size" in said:
        return  # heads that name their base's architecture
    else:
        kind = f"a full model or an EAGLE-1 head ({', '.join(names) or 'no architecture named'})"
        right = "give an EAGLE-3 head, or a full model as a draft model with --draft"
    raise ModelError(f"{folder}: {kind}, not an EAGLE-3 head of a known layout; {right}")


class _Reader:
    def __init__(self, file: Path, said: Plain) -> None:
        self._file = file
        nested = said.get(SPECULATORS)
        self._speculators = isinstance(nested, dict)
        self._said: dict[str, Any] = {**nested, **said} if isinstance(nested, dict) else dict(said)

    def config(self) -> EagleConfig:
        """All of it."""
        hidden, vocabulary = self._count("hidden_size"), self._count("vocab_size")
        heads = self._count("num_attention_heads")
        kv_heads = self._count("num_key_value_heads", heads)
        divides = f"a divisor of num_attention_heads ({heads})"
        self._checked("num_key_value_heads", kv_heads, heads % kv_heads == 0, divides)
        head_size = self._count("head_dim", max(1, hidden // heads))
        self._checked("head_dim", head_size, head_size % 2 == 0, "even")
        draft = self._count("draft_vocab_size", vocabulary)
        self._checked("draft_vocab_size", draft, draft <= vocabulary, f"at most vocab_size ({vocabulary})")
        positions = self._count("max_position_embeddings", 2048)
        return EagleConfig(
            hidden_size=hidden,
            target_hidden_size=self._count("target_hidden_size", hidden),
            vocab_size=vocabulary,
            draft_vocab_size=draft,
            num_hidden_layers=self._count("num_hidden_layers", 1, MAX_LAYERS),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_size,
            intermediate_size=self._count("intermediate_size"),
            rms_norm_eps=self._epsilon(),
            max_position_embeddings=positions,
            rope_parameters=self._rope(heads, head_size, positions),
            hidden_act=self._activation(),
            attention_bias=self._flag("attention_bias", default=self._flag("bias")),
            # The speculators library leaves it out where it is so.
            norm_before_residual=self._flag("norm_before_residual", default=self._speculators),
            tie_word_embeddings=self._flag("tie_word_embeddings") and draft == vocabulary,
            **{name: self._flag(name) for name in ("mlp_bias", "norm_before_fc", "fc_norm", "norm_output")},
            aux_layers=self._aux_layers(),
        )

    def _wrong(self, key: str, wanted: str, value: object) -> ModelError:
        return ModelError(f"{self._file}: {key} must be {wanted}, got {value!r}")

    def _checked(self, key: str, value: T, right: bool, wanted: str) -> T:
        if not right:
            raise self._wrong(key, wanted, value)
        return value

    def _count(self, key: str, default: int | None = None, maximum: int = MAX_SIZE) -> int:
        value: int | None = self._said.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self._file}: has no {key}; it must describe an EAGLE-3 head, as training writes it")
            return default
        right = type(value) is int and 1 <= value <= maximum
        return self._checked(key, value, right, f"a whole number from 1 to {maximum}")

    def _flag(self, key: str, *, default: bool = False) -> bool:
        value = self._said.get(key)
        return default if value is None else self._checked(key, value, type(value) is bool, "true or false")

    def _epsilon(self) -> float:
        value = self._said.get("rms_norm_eps", 1e-6)
        right = type(value) in (int, float) and 0 < value < 1
        return float(self._checked("rms_norm_eps", value, right, "a number between 0 and 1"))

    def _activation(self) -> str:
        value: str = self._said.get("hidden_act", "silu")
        known = isinstance(value, str) and value in ACT2FN
        return self._checked("hidden_act", value, known, "an activation that transformers knows, such as 'silu'")

    def _rope(self, heads: int, head_size: int, positions: int) -> Plain:
        """Older files say ``rope_theta`` and ``rope_scaling``, newer ones ``rope_parameters``."""
        said = {key: self._said[key] for key in ("rope_theta", "rope_scaling", "rope_parameters") if key in self._said}
        if said.get("rope_parameters"):
            said = {"rope_parameters": said["rope_parameters"]}
        try:
            given = {key: value for key, value in said.items() if value is not None}
            config = _llama(heads, head_size, positions, **given)
        except Exception as error:  # whatever transformers raises for what it cannot read
            raise self._wrong(" or ".join(said) or "rope_parameters", "as transformers knows it", said) from error
        rope = dict(config.rope_parameters or {})
        known = ("default", *ROPE_INIT_FUNCTIONS)
        if rope.get("rope_type", "default") not in known:
            raise self._wrong("rope_type", f"one of {', '.join(known)}", rope["rope_type"])
        return rope

    def _aux_layers(self) -> tuple[int, ...]:
        """The authors and vLLM count what a layer reads; ``eagle_config``, as ModelOpt and SGLang, what it writes."""
        inner = self._said.get("eagle_config")
        value, written = self._said.get(AUX), 0
        if value is None and isinstance(inner, dict):
            value, written = inner.get(AUX), 1
        if value is None or value == []:
            return ()
        right = isinstance(value, list) and len(value) <= MAX_AUX
        right = right and all(type(layer) is int and 0 <= layer <= MAX_SIZE for layer in value)
        self._checked(AUX, value, right, f"a list of up to {MAX_AUX} layers of the target")
        return tuple(layer + written for layer in value)
