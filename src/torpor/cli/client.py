"""How the command line talks to a running server."""

from __future__ import annotations

from typing import Annotated, Any

import httpx
import typer

from torpor.cli.values import read_secret
from torpor.errors import EngineDeadError, PeerError, StateError, TorporError

CONNECT_S = 5.0
# A proxy that the environment names is for other machines: to it, loopback is its own.
NO_PROXY: dict[str, None] = dict.fromkeys(("all://localhost", "all://127.0.0.1", "all://[::1]"))

Url = Annotated[
    str, typer.Argument(metavar="URL", help="The server's address, such as http://localhost:8000.", show_default=False)
]
Token = Annotated[
    str | None,
    typer.Option(
        "--admin-token-file",
        help="File with the server's admin token.",
        metavar="FILE",
        parser=read_secret,
        show_default=False,
    ),
]


class AdminClient:
    """Admin routes of one server. Errors of the server come back as ours, with its message."""

    def __init__(self, url: str, token: str | None, timeout_s: float | None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._url = with_scheme(url)
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(timeout_s, connect=CONNECT_S), mounts=NO_PROXY)

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.close()

    def call(self, method: str, path: str, query: dict[str, Any] | None = None, body: Any = None) -> dict[str, Any]:
        """The answer's JSON. PeerError when nobody answers, StateError for an answer that is an error."""
        given = {k: v for k, v in (query or {}).items() if v is not None}
        try:
            answer = self._client.request(method, self._url + path, params=given, json=body)
        except httpx.TimeoutException as e:
            raise PeerError(f"{self._url} did not answer in time ({type(e).__name__})", peer=self._url) from e
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise PeerError(f"cannot reach {self._url}: {e}", peer=self._url) from e
        if answer.status_code != 200:
            raise answer_error(answer, path)
        found = json_of(answer)
        if not isinstance(found, dict):
            raise PeerError(f"{self._url}{path} is not a torpor server's answer", peer=self._url)
        return found


def json_of(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None


def answer_error(answer: httpx.Response, path: str) -> TorporError:
    found = json_of(answer)
    error = found.get("error") if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else answer.text[:200]
    if isinstance(error, dict) and error.get("code") == "engine_dead":
        return EngineDeadError(str(message))
    return StateError(f"{path}: HTTP {answer.status_code}: {message}", state=str(answer.status_code))


def with_scheme(url: str) -> str:
    """``localhost:8000`` is meant as http."""
    return (url if "://" in url else f"http://{url}").rstrip("/")
