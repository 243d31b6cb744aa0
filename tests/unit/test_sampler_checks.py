"""What the door refuses: each field of the sampling parameters, by name."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np
import pytest

from torpor.engine.sampling_checks import check_sampling_params, check_token_ids, plain_sampling, plain_token_ids
from torpor.errors import RequestError
from torpor.request import SamplingParams

NAN = float("nan")
INF = float("inf")


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0},
        {"temperature": 5.5, "top_k": 10**6, "top_p": 1, "min_p": 1},
        {"seed": -(1 << 63)},
        {"seed": (1 << 64) - 1, "logprobs": 20},
        {"frequency_penalty": -2, "presence_penalty": 2.0, "repetition_penalty": 0.1},
        {"max_tokens": 5, "min_tokens": 5, "stop": ("\n",), "stop_token_ids": (0, 99)},
    ],
)
def test_accepted(params: dict[str, Any]) -> None:
    check_sampling_params(SamplingParams(**params), 100)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INF),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", NAN),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", 1 << 64),
        ("seed", -(1 << 63) - 1),
        ("seed", 0.5),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop", "ab"),
        ("stop", ("a", "\ud800")),
        ("temperature", np.float32("nan")),
        ("max_tokens", np.int64(0)),
        ("seed", np.float64(1)),
        ("stop", None),
        ("stop_token_ids", (100,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", 3),
        ("stop_token_ids", (3.0,)),
        ("ignore_eos", "yes"),
        ("skip_special_tokens", 0),
        ("include_stop_str_in_output", None),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", INF),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(RequestError, match=param) as caught:
        check_sampling_params(SamplingParams(**{param: value}), 100)
    assert caught.value.param == param


def test_token_ids_beyond_the_vocabulary() -> None:
    check_token_ids("prompt", [], 10)
    check_token_ids("prompt", [0, 9], 10)
    for bad in ([0, 10], [-1, 3]):
        with pytest.raises(RequestError, match="token ids from 0 to 9") as caught:
            check_token_ids("prompt", bad, 10)
        assert caught.value.param == "prompt"


@pytest.mark.parametrize("bad", [[1.0, 2], [1, True], ["1"], [None]])
def test_what_is_no_integer_is_no_token_id(bad: list[Any]) -> None:
    with pytest.raises(RequestError, match="integers") as caught:
        check_token_ids("prompt", bad, 10)
    assert caught.value.param == "prompt"


class Word(str):
    pass


class Temperature(float):
    pass


class Order(enum.IntEnum):
    SECOND = 2


class Choice(str, enum.Enum):
    END = "END"


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"temperature": np.float64(0.5)}, {"temperature": 0.5}),
        ({"temperature": np.float32(0.5), "top_p": np.float16(0.5)}, {"temperature": 0.5, "top_p": 0.5}),
        ({"temperature": Temperature(2)}, {"temperature": 2.0}),
        ({"max_tokens": np.int64(7), "min_tokens": np.uint8(3)}, {"max_tokens": 7, "min_tokens": 3}),
        ({"seed": np.int32(-4), "top_k": Order.SECOND}, {"seed": -4, "top_k": 2}),
        ({"stop": [Word("a"), Choice.END, np.str_("b")]}, {"stop": ("a", "END", "b")}),
        ({"stop_token_ids": list(np.arange(3))}, {"stop_token_ids": (0, 1, 2)}),
        ({}, {}),
    ],
)
def test_what_is_accepted_can_be_sent_and_read(given: dict[str, Any], plain: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    check_sampling_params(params, 100)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(plain_sampling(params)), type=SamplingParams)
    assert sent == SamplingParams(**plain)


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.arange(1, 3), [1, np.uint16(2)]])
def test_token_ids_become_plain(ids: Any) -> None:
    found = plain_token_ids(ids)
    assert (found, {type(t) for t in found}) == ([1, 2], {int})


def test_numpy_s_integers_are_integers() -> None:
    check_token_ids("prompt", list(np.arange(10)), 10)
