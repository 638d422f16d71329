"""The forms in which models write tool calls, as data: what opens one, what closes it, what stands between several.

A parser reads every variant of its form (serving.text.tools.parser); grammars and prompts write the one that is here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolForm:
    """Calls read `begin` call `between` call … `end`; a call is `head(name)`, its arguments as JSON, and `tail`."""

    name: str
    opens: tuple[str, ...] = ()  # marks that open calls anywhere in an answer
    closes: tuple[str, ...] = ()  # marks that belong to calls and are not shown after one
    bare: bool = False  # a call may also stand at the beginning of an answer, without a mark
    named: bool = False  # a mark may be followed by a name instead of an object
    short_ids: bool = False  # templates want ids of nine letters and digits
    begin: str
    between: str
    end: str
    key: str = "arguments"
    writes_named: bool = False
    others: tuple[tuple[str, str], ...] = ()  # further (begin, end) that models of this form write

    def head(self, name: str) -> str:
        if self.writes_named:
            return f"{name}[ARGS]"
        return f'{{"name": {json.dumps(name)}, "{self.key}": '

    @property
    def tail(self) -> str:
        return "" if self.writes_named else "}"

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens, and have to be seen nevertheless."""
        return (*self.opens, *self.closes, *(("[ARGS]", "[CALL_ID]") if self.named else ()))

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each a name and its arguments' JSON, as the model would write them."""
        written = [self.head(name) + arguments + self.tail for name, arguments in calls]
        return self.begin + self.between.join(written) + self.end


HERMES = ToolForm(
    name="hermes",
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    begin="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
)
GENERIC = replace(HERMES, name="generic")
LLAMA3_JSON = ToolForm(
    name="llama3_json",
    opens=("<|python_tag|>",),
    bare=True,
    begin="",
    between="; ",
    end="",
    key="parameters",
    others=(("<|python_tag|>", ""),),
)
MISTRAL = ToolForm(
    name="mistral",
    opens=("[TOOL_CALLS]",),
    named=True,
    short_ids=True,
    begin="[TOOL_CALLS][",
    between=", ",
    end="]",
)
MISTRAL_NAMED = replace(MISTRAL, begin="[TOOL_CALLS]", between="[TOOL_CALLS]", end="", writes_named=True)
PHI4_MINI_JSON = ToolForm(
    name="phi4_mini_json",
    opens=("functools", "<|tool_call|>"),
    closes=("<|/tool_call|>",),
    begin="<|tool_call|>[",
    between=", ",
    end="]<|/tool_call|>",
    others=(("functools[", "]"),),
)
PHI_FUNCTOOLS = replace(
    PHI4_MINI_JSON, begin="functools[", end="]", others=((PHI4_MINI_JSON.begin, PHI4_MINI_JSON.end),)
)


def form_named(parser: str, template: str) -> ToolForm | None:
    """The form for a value of --tool-call-parser, in the variant that a chat template shows; None for `none`.

    For `auto` it is the form whose marks the template has, and the generic one where it has none.
    """
    kind = _kind_of(template) if parser == "auto" else parser
    match kind:
        case "hermes":
            return HERMES
        case "llama3_json":
            return LLAMA3_JSON
        case "mistral":
            return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
        case "phi4_mini_json":
            return PHI_FUNCTOOLS if "functools" in template else PHI4_MINI_JSON
        case "generic":
            return GENERIC
    return None


def _kind_of(template: str) -> str:
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "functools" in template or "<|tool_call|>" in template or "<|tool|>" in template:
        return "phi4_mini_json"
    # Others open calls with the same mark, but write them as XML inside.
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"
    if "<|python_tag|>" in template or ('"parameters"' in template and "<|start_header_id|>" in template):
        return "llama3_json"
    return "generic"
