"""The scheduler side: what a client's ``kv_transfer_params`` may say, how many tokens come from a peer, what is handed off."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torpor.connectors.base import token_digest
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.scheduler import PullScheduler
from torpor.errors import RequestError
from torpor.kvcache.types import BlockId
from torpor.request import GenerationRequest, SamplingParams
from torpor.scheduler.base import SchedulerConnector
from torpor.testing.kv_engine import SMALL_SPEC

METADATA = {"engine_id": "P", "epoch": "00000000000000ab.3", "host": "127.0.0.1", "port": 4242}
PROMPT = list(range(100, 110))  # 10 tokens: 3 blocks of 4


def make(role: str = "both", secret_file: str | None = None, dials_hosts: bool = False) -> PullScheduler:
    config = ConnectorConfig(connector="ipc", engine_id="D", role=role, secret_file=secret_file)  # type: ignore[arg-type]
    side = PullScheduler(config, SMALL_SPEC, dials_hosts=dials_hosts)
    side.set_kv_metadata(METADATA)
    return side


def request(params: dict[str, Any] | None, prompt: list[int] = PROMPT) -> GenerationRequest:
    return GenerationRequest(request_id="q", prompt_token_ids=prompt, sampling=SamplingParams(), kv_transfer_params=params)


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(i) for i in ids]


@pytest.fixture
def handed() -> dict[str, Any]:
    """What a prefill engine answers."""
    kept, params = make().request_finished(request({"do_remote_decode": True}), blocks(5, 6, 7), 10)
    assert kept
    assert params is not None
    return params


def test_it_is_what_the_scheduler_asks_for() -> None:
    side: SchedulerConnector = make()
    assert side is not None


class TestHandOff:
    def test_params_are_plain_json_with_vllm_s_names(self, handed: dict[str, Any]) -> None:
        assert json.loads(json.dumps(handed)) == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "P",
            "remote_request_id": "q",
            "remote_block_ids": [5, 6, 7],
            "remote_host": "127.0.0.1",
            "remote_port": 4242,
            "remote_num_tokens": 10,
            "tp_size": 1,
            "torpor": {"epoch": "00000000000000ab.3", "lease": 1},
        }

    def test_the_worker_hears_of_it_once(self) -> None:
        side = make()
        side.request_finished(request({"do_remote_decode": True}), blocks(5, 6, 7), 10)
        (told,) = side.build_connector_meta().hand_offs
        assert (told.request_id, told.block_ids, told.num_tokens, told.lease) == ("q", [5, 6, 7], 10, 1)
        assert told.digest == token_digest(PROMPT[:10])
        assert not side.build_connector_meta()

    def test_every_one_has_a_lease_of_its_own(self) -> None:
        side = make()
        numbers = [side.request_finished(request({"do_remote_decode": True}), blocks(1, 2, 3), 10)[1] for _ in range(3)]
        assert [n["torpor"]["lease"] for n in numbers if n] == [1, 2, 3]

    def test_only_the_prompt_s_kv_is_handed_off(self) -> None:
        kept, params = make().request_finished(request({"do_remote_decode": True}), blocks(1, 2, 3, 4, 5), 17)
        assert kept
        assert params is not None
        assert (params["remote_num_tokens"], params["remote_block_ids"]) == (10, [1, 2, 3])

    @pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, {"do_remote_decode": None}])
    def test_nothing_is_unless_it_was_asked_for(self, params: dict[str, Any] | None) -> None:
        side = make()
        assert side.request_finished(request(params), blocks(1, 2, 3), 10) == (False, None)
        assert not side.build_connector_meta()

    def test_nothing_is_while_released(self) -> None:
        side = make()
        side.set_kv_metadata(None)
        assert side.request_finished(request({"do_remote_decode": True}), blocks(1, 2, 3), 10) == (False, None)


class TestLoad:
    @pytest.mark.parametrize(
        ("computed", "external"),
        [(0, 9), (4, 5), (8, 1), (12, 0)],
    )
    def test_the_last_token_is_always_computed_here(self, handed: dict[str, Any], computed: int, external: int) -> None:
        assert make().get_num_new_matched_tokens(request(handed), computed) == (external, external > 0)

    def test_a_longer_prompt_takes_what_there_is(self, handed: dict[str, Any]) -> None:
        assert make().get_num_new_matched_tokens(request(handed, [*PROMPT, 1, 2, 3]), 0) == (10, True)

    @pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True, "remote_block_ids": None}])
    def test_nothing_comes_without_a_hand_off(self, params: dict[str, Any] | None) -> None:
        side = make()
        assert side.get_num_new_matched_tokens(request(params), 0) == (0, False)
        side.update_state_after_alloc(request(params), [], 0)
        assert not side.build_connector_meta()

    def test_blocks_after_those_of_the_prefix_cache(self, handed: dict[str, Any]) -> None:
        side = make()
        side.update_state_after_alloc(request(handed), blocks(0, 2), 5)
        (load,) = side.build_connector_meta().loads
        assert (load.first_block, load.local_block_ids, load.digest) == (1, [0, 2], token_digest(PROMPT[:10]))

    def test_a_prompt_that_is_cached_here_lets_the_peer_go(self, handed: dict[str, Any]) -> None:
        side = make()
        side.update_state_after_alloc(request(handed), [], 0)
        (load,) = side.build_connector_meta().loads
        assert load.local_block_ids == []

    def test_a_cancelled_one_is_told_to_the_worker(self) -> None:
        side = make()
        side.cancel_load("q")
        assert side.build_connector_meta().cancelled == ["q"]


class TestParams:
    def test_those_of_a_hand_off_are_good(self, handed: dict[str, Any]) -> None:
        make().check_params(handed | {"something_a_router_added": [1]}, 10)
        make().check_params({"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None}, 10)
        make().check_params({}, 10)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"do_remote_prefill": "yes"}, "do_remote_prefill"),
            ({"remote_block_ids": [0, 1]}, "remote_block_ids"),
            ({"remote_block_ids": [0, 1, -1]}, "remote_block_ids"),
            ({"remote_block_ids": [0, 1, 2.5]}, "remote_block_ids"),
            ({"remote_block_ids": "012"}, "remote_block_ids"),
            ({"remote_block_ids": []}, "remote_block_ids"),
            ({"remote_num_tokens": 0}, "remote_num_tokens"),
            ({"remote_num_tokens": 12}, "remote_num_tokens"),
            ({"remote_engine_id": None}, "remote_engine_id"),
            ({"remote_engine_id": "D"}, "remote_engine_id"),
            ({"remote_host": 5}, "remote_host"),
            ({"remote_port": 70000}, "remote_port"),
            ({"tp_size": 2}, "tp_size"),
            ({"torpor": None}, "torpor"),
            ({"torpor": {"epoch": "yesterday", "lease": 1}}, "epoch"),
            ({"torpor": {"epoch": "zz00000000000000.1", "lease": 1}}, "kv_transfer_params"),
            ({"torpor": {"epoch": METADATA["epoch"], "lease": 0}}, "lease"),
        ],
    )
    def test_each_wrong_field_is_named(self, handed: dict[str, Any], change: dict[str, Any], named: str) -> None:
        with pytest.raises(RequestError, match=named) as caught:
            make().check_params(handed | change, 10)
        assert caught.value.fields["param"].startswith("kv_transfer_params")

    def test_a_missing_field_is_named(self, handed: dict[str, Any]) -> None:
        del handed["remote_request_id"]
        with pytest.raises(RequestError, match="remote_request_id"):
            make().check_params(handed, 10)

    @pytest.mark.parametrize(("role", "what"), [("consumer", "do_remote_decode"), ("producer", "do_remote_prefill")])
    def test_a_role_that_cannot_is_named(self, handed: dict[str, Any], role: str, what: str) -> None:
        params = handed if what == "do_remote_prefill" else {"do_remote_decode": True}
        with pytest.raises(RequestError, match=f"{what}.*kv_role"):
            make(role).check_params(params, 10)

    def test_another_machine_needs_a_secret(self, handed: dict[str, Any]) -> None:
        far = handed | {"remote_host": "10.1.2.3"}
        with pytest.raises(RequestError, match="kv_secret_file"):
            make(dials_hosts=True).check_params(far, 10)
        make(dials_hosts=True, secret_file="/some/file").check_params(far, 10)
        make(dials_hosts=False).check_params(far, 10)
