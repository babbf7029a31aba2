"""What docs/protocol.md shows of the table of a session's states: ``python -m tests.protocol_page`` writes it."""

from __future__ import annotations

import sys

from speculation.request.record import KINDS, TRANSITIONS, SessionState


def page_section() -> str:
    """The table as docs/protocol.md shows it: what each state means, and a diagram of the ways between them."""
    meanings = [f"| {state.label} | {state.meaning} | {_unmoved_by(state)} |" for state in SessionState]
    arrows = [
        f"    {state.label} --> {after.label}: {', '.join(kinds)}"
        for state, row in TRANSITIONS.items()
        for after in SessionState
        if after is not state and (kinds := [kind.__name__ for kind in KINDS if after in row.get(kind, ())])
    ]
    head = ["| state | what it means | what may leave it as it is |", "|---|---|---|"]
    ends = f"    [*] --> {SessionState.NEW.label}", f"    {SessionState.ENDED.label} --> [*]"
    diagram = ["```mermaid", "stateDiagram-v2", ends[0], *arrows, ends[1], "```"]
    return "\n".join([*head, *meanings, "", *diagram])


def _unmoved_by(state: SessionState) -> str:
    return ", ".join(f"`{kind.__name__}`" for kind in KINDS if state in TRANSITIONS[state].get(kind, ()))


if __name__ == "__main__":
    sys.stdout.write(page_section() + "\n")
