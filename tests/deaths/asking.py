"""Clients that ask all the time and judge every answer: right, or an error in OpenAI's shape, and never late."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from typing import Any

import httpx

ASK_S = 45.0  # no answer may take longer, whoever is stopped
CLIENTS = 3
TEXTS = 8
MAX_TOKENS = 24


def make_prompts(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(32, 127) for _ in range(rng.randint(12, 80))] for _ in range(TEXTS)]


def body(prompt: list[int], stream: bool = False) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}


def check_error(answer: dict[str, Any]) -> str:
    error = answer["error"]
    assert isinstance(error["message"], str), error
    assert error["message"], error
    assert {"type", "code", "param"} <= set(error), error
    assert error["code"] != "internal_error", error
    return str(error["code"])


class Asker:
    """Threads between ``start`` and ``stop``. ``door_dies``: the router itself is the victim, so connections to it may break."""

    def __init__(self, url: str, prompts: list[list[int]], answers: list[str], door_dies: bool, seed: int) -> None:
        self.ends: Counter[str] = Counter()
        self.faults: list[str] = []
        self._url = f"{url}/v1/completions"
        self._prompts = prompts
        self._answers = answers
        self._door_dies = door_dies
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(random.Random(seed + n),)) for n in range(CLIENTS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(ASK_S + 10)
            assert not thread.is_alive(), "a request hangs"

    def _run(self, rng: random.Random) -> None:
        with httpx.Client(timeout=httpx.Timeout(ASK_S, connect=5.0)) as http:
            while not self._stopping.is_set():
                number, stream = rng.randrange(TEXTS), rng.random() < 0.5
                started = time.monotonic()
                try:
                    end = self._stream(http, number) if stream else self._whole(http, number)
                except httpx.HTTPError as error:
                    end = "broken"
                    if not self._door_dies:
                        self.faults.append(f"{type(error).__name__} after {time.monotonic() - started:.1f} s (stream: {stream})")
                except Exception as error:  # whatever shape an answer has: a thread that ends would ask no more, and tell nobody
                    end = "wrong"
                    self.faults.append(f"{type(error).__name__}: {error}")
                self.ends[end] += 1
                if end != "right":
                    self._stopping.wait(0.1)

    def _whole(self, http: httpx.Client, number: int) -> str:
        response = http.post(self._url, json=body(self._prompts[number]))
        if response.status_code != 200:
            return check_error(response.json())
        choice = response.json()["choices"][0]
        return self._judge(number, choice["text"], choice["finish_reason"])

    def _stream(self, http: httpx.Client, number: int) -> str:
        """A stream that breaks off says so in an event, and ends as streams do."""
        text, end, reason = "", "", None
        with http.stream("POST", self._url, json=body(self._prompts[number], stream=True)) as response:
            if response.status_code != 200:
                response.read()
                return check_error(response.json())
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    end = end or self._judge(number, text, reason)
                elif data:
                    event = json.loads(data)
                    if "error" in event:
                        end = check_error(event)
                    for choice in event.get("choices", ()):
                        text += choice["text"]
                        reason = choice["finish_reason"] or reason
        assert end or self._door_dies, "the stream just stopped"
        self._check_begun(number, text)
        return end or "broken"

    def _judge(self, number: int, text: str, reason: str | None) -> str:
        """Of an answer that has ended well. A sleep in mode "abort" ends what runs with what there is, and says so."""
        self._check_begun(number, text)
        if reason == "abort":
            return "aborted"
        assert text == self._answers[number], f"wrong text: {text!r}, not {self._answers[number]!r}, and it ended with {reason}"
        return "right"

    def _check_begun(self, number: int, text: str) -> None:
        right = self._answers[number]
        assert right.startswith(text.rstrip("\ufffd")), f"wrong text: {text!r}, not {right!r}"
