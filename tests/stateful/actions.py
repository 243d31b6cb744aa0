"""One rule that draws what to do. With a rule for each action hypothesis would leave most of them out of most histories, and an
engine that never sleeps, or never wakes, proves nothing."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Action = tuple[str, dict[str, Any]]


def action(method: str, times: int = 1, **arguments: st.SearchStrategy[Any]) -> list[st.SearchStrategy[Action]]:
    """The method's name and its arguments; ``times`` as likely as others."""
    return [st.tuples(st.just(method), st.fixed_dictionaries(arguments))] * times


def one_of(*actions: list[st.SearchStrategy[Action]]) -> st.SearchStrategy[Action]:
    return st.sampled_from([a for kind in actions for a in kind]).flatmap(lambda chosen: chosen)
