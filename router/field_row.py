"""What the field table says of one request field."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

Kind = Literal["completion", "chat"]
Schema = dict[str, Any]


class Support(StrEnum):
    """What becomes of a field."""

    SUPPORTED = "supported"
    LABEL = "accepted, has no effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Row:
    """One field, by the path to it: ``stream_options.include_usage``, ``messages[].role``."""

    name: str
    schema: Schema
    """JSON Schema of its values but null; of a refused one, of those that ask for nothing."""
    about: str
    """What it does; of a refused one, why it does not."""
    default: str = ""
    """In words."""
    examples: tuple[object, ...] = ()
    where: Literal["both", Kind] = "both"
    """The endpoints that know it."""
    required: bool = False
    support: Support = Support.SUPPORTED

    @property
    def inside(self) -> str:
        """The path of the object it is a field of; empty for the body."""
        return self.name.rpartition(".")[0]

    @property
    def own_name(self) -> str:
        """Without the path."""
        return self.name.rpartition(".")[2]

    def of(self, kind: Kind) -> bool:
        """Whether the endpoint knows it."""
        return self.where in ("both", kind)


def refused(name: str, about: str, neutral: tuple[object, ...] = (), where: Literal["both", Kind] = "both") -> Row:
    """A field that is known and refused; ``neutral``: values, besides null, that ask for nothing."""
    return Row(name, {"enum": [*neutral, None]}, about, where=where, support=Support.REFUSED)
