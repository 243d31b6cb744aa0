"""How often each token occurs in a sequence: what penalties ask for at every step."""

from __future__ import annotations

from array import array


class TokenCounts:
    """Of a prompt and the outputs after it; the lists are the sequence's own and only grow.

    Nothing is counted before the first question, and then each token once: a step costs its new tokens, not the whole context
    (``np.unique`` of 8,192 tokens takes 0.4 ms, for each sequence and step)."""

    __slots__ = ("_counts", "_ids", "_num_outputs", "_places", "outputs", "prompt")

    def __init__(self, prompt: list[int], outputs: list[int]) -> None:
        self.prompt = prompt
        self.outputs = outputs
        self._places: dict[int, int] | None = None  # token -> where it is in the arrays
        self._ids = array("q")
        self._counts = array("q")
        self._num_outputs = 0  # of them are counted

    def seen(self) -> tuple[array[int], array[int]]:
        """Each token of prompt and outputs once, and how often it is in the outputs; int64. Its own arrays: copy them, for they
        cannot grow while anything is a view of them."""
        if self._places is None:
            distinct = dict.fromkeys(self.prompt)
            self._places = dict(zip(distinct, range(len(distinct)), strict=True))
            self._ids.extend(distinct)
            self._counts.extend(bytes(len(distinct)))
        for token in self.outputs[self._num_outputs :]:
            place = self._places.setdefault(token, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            self._counts[place] += 1
        self._num_outputs = len(self.outputs)
        return self._ids, self._counts
