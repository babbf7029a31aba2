"""The request fields about tools: which functions a model may call, whether it must, and calls it made before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from router.errors import ApiError
from router.field_bounds import FUNCTION_NAME, MAX_TOOLS
from router.fields import Fields, loads
from router.tokenizer import Tokenizer
from router.tool_calls import ToolForm

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


def tools_of(fields: Fields, tokenizer: Tokenizer) -> Tools:
    """``tools``, ``tool_choice`` and ``parallel_tool_calls``. Raises :class:`ApiError`."""
    template = tokenizer.chat_template
    value = fields.get("tools")
    if value is not None and not isinstance(value, list):
        raise fields.wrong_type("tools", "an array of functions")
    if value and len(value) > MAX_TOOLS:
        raise fields.wrong_value("tools", f"at most {MAX_TOOLS} functions")
    tools = [_tool(item, f"tools[{index}]") for index, item in enumerate(value or [])]
    chosen = _choice(fields, tools)
    several = fields.boolean("parallel_tool_calls", True)
    if not tools or chosen is Choice.NONE or template is None:  # without template there is no chat at all
        return Tools()
    if not template.knows_tools:
        raise ApiError("unsupported_parameter", f"tools cannot be offered: {NO_TOOLS}", "tools")
    if template.tool_form is None:
        forms = " and ".join(ToolForm)
        message = f"tools cannot be offered: the model's chat template shows no form of calls known here ({forms})"
        raise ApiError("unsupported_parameter", message, "tools")
    if isinstance(chosen, Choice):
        demanded = range(len(tools)) if chosen is Choice.REQUIRED else ()
        return Tools(tools, template.tool_form, several, demanded)
    named = [index for index, tool in enumerate(tools) if tool["function"]["name"] == chosen]
    return Tools(tools, template.tool_form, several=False, demanded=named)


class Choice(StrEnum):
    """``tool_choice``, where it is no function's name."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


def _tool(item: object, where: str) -> dict[str, Any]:
    fields = _object(item, where, "an object with type and function")
    fields.refuse_others(frozenset({"type", "function"}))
    if fields.get("type") != "function":
        raise fields.wrong_value("type", '"function"')
    if fields.get("function") is None:
        raise fields.missing("function", "an object with a name")
    function = fields.nested("function")
    function.refuse_others(frozenset({"name", "description", "parameters", "strict"}))
    name = function.string("name", None)
    if name is None:
        raise function.missing("name", "a string")
    if not FUNCTION_NAME.fullmatch(name):
        raise function.wrong_value("name", "1 to 64 letters, digits, underscores, dots and dashes")
    function.string("description", None)
    function.nested("parameters")
    function.boolean("strict")
    return {"type": "function", "function": {key: value for key, value in function.raw.items() if value is not None}}


def _choice(fields: Fields, tools: Sequence[dict[str, Any]]) -> Choice | str:
    """A function's name is never a :class:`Choice`, whatever its letters."""
    value = fields.get("tool_choice")
    if isinstance(value, dict):
        return _chosen(fields.nested("tool_choice"), tools)
    expected = f'{", ".join(Choice)} or {{"type": "function", "function": {{"name": ...}}}}'
    if value is not None and not isinstance(value, str):
        raise fields.wrong_type("tool_choice", expected)
    if value not in (None, *Choice):
        raise fields.wrong_value("tool_choice", expected)
    if value == Choice.REQUIRED and not tools:
        raise fields.wrong_value("tool_choice", "left out where there are no tools")
    return Choice(value or Choice.AUTO)


def _chosen(choice: Fields, tools: Sequence[dict[str, Any]]) -> str:
    choice.refuse_others(frozenset({"type", "function"}))
    if choice.get("type") != "function":
        raise choice.wrong_value("type", '"function"')
    function = choice.nested("function")
    function.refuse_others(frozenset({"name"}))
    name = function.string("name", None)
    if name is None:
        raise function.missing("name", "the name of one of tools")
    if name not in [tool["function"]["name"] for tool in tools]:
        raise function.wrong_value("name", "the name of one of tools")
    return name


def past_calls(message: Fields) -> list[dict[str, Any]]:
    """The calls that an assistant's message made, their arguments as objects, which is how templates want them."""
    value = message.get("tool_calls")
    if value is not None and not isinstance(value, list):
        raise message.wrong_type("tool_calls", "an array of calls")
    return [_past_call(item, f"{message.where('tool_calls')}[{index}]") for index, item in enumerate(value or [])]


def _past_call(item: object, where: str) -> dict[str, Any]:
    fields = _object(item, where, "an object with id, type and function")
    fields.refuse_others(frozenset({"id", "type", "function", "index"}))
    identity = fields.string("id", None)
    if fields.choice("type", "function", ["function"]) and fields.get("function") is None:
        raise fields.missing("function", "an object with name and arguments")
    function = fields.nested("function")
    function.refuse_others(frozenset({"name", "arguments", "parsed_arguments"}))
    name, written = function.string("name", None), function.string("arguments", "{}")
    if name is None:
        raise function.missing("name", "a string")
    try:
        arguments = loads(written or "{}")
    except ValueError:
        raise function.wrong_value("arguments", "a JSON object in a string") from None
    if not isinstance(arguments, dict):
        raise function.wrong_value("arguments", "a JSON object in a string")
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if identity is None else {"id": identity, **call}


def _object(item: object, where: str, expected: str) -> Fields:
    if not isinstance(item, dict):
        raise Fields({where: item}).wrong_type(where, expected)
    return Fields(item, where)
