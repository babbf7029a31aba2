"""What to do about it: one sentence, and the configuration to paste."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.fit.agreement import SUFFIX_TOKENS
from benchmarks.fit.command import FitOptions
from benchmarks.fit.predict import PAYS, Forecast, Loaded, pays_until
from speculation.messages import Source

MORE = 1.05
"""A kind of text gains most where its speed-up is so many times that of all."""


def advice(chosen: Forecast | None, forecasts: Sequence[Forecast], loaded: Sequence[Loaded]) -> str:
    """One line in words. ``loaded``: the chosen way under load."""
    if chosen is None:
        best = max(forecasts, key=lambda one: one.speedup)
        return (
            f"plain decoding: the best way to draft, {best.way}, makes it {best.speedup:.2f} x as fast, "
            f"and below {PAYS:g} x drafting is not worth its machines"
        )
    parts = [f"{chosen.way}: {chosen.speedup:.1f} x plain decoding", _kinds(chosen), _until(loaded)]
    return "; ".join(parts)


def _kinds(chosen: Forecast) -> str:
    ranked = sorted(chosen.kinds, key=lambda kind: -chosen.kinds[kind])
    most = [kind for kind in ranked if chosen.kinds[kind] >= MORE * chosen.speedup]
    if not most or len(most) == len(ranked):
        return "all kinds of text gain alike" if len(ranked) > 1 else f"measured on {ranked[0]} alone"
    names = " and ".join(filter(None, (", ".join(most[:-1]), most[-1])))
    return f"{names} {'gains' if len(most) == 1 else 'gain'} most"


def _until(loaded: Sequence[Loaded]) -> str:
    most = pays_until(loaded)
    if most is None:
        return f"pays at all loads measured, up to {_requests(loaded[-1].sessions)}"
    return f"switch off above {_requests(most)}"


def _requests(count: int) -> str:
    return f"{count} concurrent request" + "s" * (count != 1)


def configuration(
    options: FitOptions, chosen: Forecast | None, loaded: Sequence[Loaded], translated: frozenset[str] = frozenset()
) -> str:
    """What to give ``paceline up --config``; drafters for one target at the largest load at which they pay.

    ``translated``: draft models with another tokenizer than the target.
    """
    found: dict[str, dict[str, Any]] = {"target": _worker(options, options.target)}
    if Source.SUFFIX in options.sources:
        remembers = chosen is not None and chosen.way.remembers
        found["target"]["suffix_tokens"] = SUFFIX_TOKENS if remembers else 0
    if chosen is None:
        found["speculation"] = {"enabled": False}
    else:
        way = chosen.way
        found["target"] |= {
            str(source): _path(folder) for source, folder in options.heads.items() if source in way.local
        }
        if way.draft is not None:
            paid = [one for one in loaded if one.speedup >= PAYS] or list(loaded[:1])
            found["draft"] = _worker(options, way.draft) | {"replicas": paid[-1].drafters}
            if way.draft == options.away:
                found["target"] |= {"eagle": _path(options.eagle), "eagle_at": options.eagle_at}
                del found["draft"]["model"]  # it drafts with the target's head
            if way.draft in translated:
                found["draft"]["target_tokenizer"] = _path(options.target)
        found["speculation"] = {
            "enabled": True,
            "drafters": way.draft is not None,
            "lookup": Source.LOOKUP in way.local,
            "max_depth": chosen.depth,
        }
    return yaml.safe_dump(found, sort_keys=False)


def _worker(options: FitOptions, model: str) -> dict[str, Any]:
    """Settings of a worker as they were measured with."""
    given = {"dtype": options.dtype, "device": options.device, "threads": options.threads}
    default = FitOptions()
    return {"model": _path(model)} | {name: value for name, value in given.items() if value != getattr(default, name)}


def _path(model: str) -> str:
    """A folder, wherever the configuration is read from; or a hub id."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model
