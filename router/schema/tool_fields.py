"""The request fields about tools: which functions a model may call, and whether it must."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router.errors import ApiError
from router.schema.fields import wrong_value
from router.schema.request_objects import NamedTool
from router.schema.request_schema import ChatBody
from router.text.tokenizer import Tokenizer
from router.text.tool_calls import ToolForm

NO_TOOLS = "the model's chat template has no place for tools"


@dataclass(frozen=True, slots=True)
class Tools:
    """What a request offers."""

    offered: Sequence[dict[str, Any]] = ()
    """As the caller wrote them, for the chat template."""
    form: ToolForm | None = None
    """How calls are written in the text; None: it is not searched for any."""
    several: bool = True
    """False: the answer ends with its first call."""
    demanded: Sequence[int] = ()
    """Of which functions, by their places in ``offered``, one must be called; none: there need not be a call."""

    @property
    def names(self) -> frozenset[str]:
        """Of the functions."""
        return frozenset(tool["function"]["name"] for tool in self.offered)

    @property
    def strict(self) -> bool:
        """Whether the arguments of some function have to follow its schema, if it is called."""
        return any(tool["function"].get("strict") for tool in self.offered)


def _demanded(body: ChatBody) -> list[int]:
    """Numbers of the tools of which one has to be called; none: the model is free."""
    chosen = body.tool_choice
    if isinstance(chosen, NamedTool):
        return [index for index, tool in enumerate(body.tools) if tool.function["name"] == chosen.function.name]
    return list(range(len(body.tools))) if chosen == "required" else []


def tools_of(body: ChatBody, tokenizer: Tokenizer) -> Tools:
    """``tools``, ``tool_choice`` and ``parallel_tool_calls``. Raises :class:`ApiError`."""
    template, chosen = tokenizer.chat_template, body.tool_choice
    tools = [{"type": tool.type, "function": tool.function} for tool in body.tools]
    demanded = _demanded(body)
    if isinstance(chosen, NamedTool) and not demanded:
        raise wrong_value("tool_choice.function.name", "the name of one of tools", chosen.function.name)
    if chosen == "required" and not tools:
        raise wrong_value("tool_choice", "left out where there are no tools", chosen)
    if not tools or chosen == "none" or template is None:  # without template there is no chat at all
        return Tools()
    if not template.knows_tools:
        raise ApiError("unsupported_parameter", f"tools cannot be offered: {NO_TOOLS}", "tools")
    if template.tool_form is None:
        forms = " and ".join(ToolForm)
        message = f"tools cannot be offered: the model's chat template shows no form of calls known here ({forms})"
        raise ApiError("unsupported_parameter", message, "tools")
    several = body.parallel_tool_calls and not isinstance(chosen, NamedTool)
    return Tools(tools, template.tool_form, several, demanded)
