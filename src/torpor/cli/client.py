"""How the command line talks to a running server."""

from __future__ import annotations

from typing import Annotated, Any

import httpx
import typer

from torpor.cli.values import read_secret
from torpor.errors import ConfigurationError, EngineDeadError, PeerError, StateError, TorporError

CONNECT_S = 5.0
MAX_TIMEOUT_S = 7 * 86400.0  # no timeout of the system's takes infinity
# A proxy that the environment names is for other machines: to it, loopback is its own.
NO_PROXY: dict[str, None] = dict.fromkeys(("all://localhost", "all://127.0.0.1", "all://[::1]"))

# The longer before what they contain.
COMMANDS = (
    ("POST /sleep?level=0", "sleep {url} --level 0"),
    ("POST /wake_up", "wake {url}"),
    ("POST /pause", "pause {url}"),
    ("POST /resume", "resume {url}"),
)
OPTIONS = {"level": "--level", "mode": "--mode", "deadline_s": "--deadline-s", "policies": "--policy", "tags": "--tag"}

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


class AnswerTimeout(PeerError):
    """The server has the request, and goes on with it."""


class AdminClient:
    """Admin routes of one server. Errors of the server come back as ours, with its message."""

    def __init__(self, url: str, token: str | None, timeout_s: float) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._url, self._timeout_s = with_scheme(url), timeout_s
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
            if answer.status_code == 404:
                self._refuse_router()
        except httpx.ReadTimeout as e:
            raise AnswerTimeout(f"{self._url} did not answer within {self._timeout_s:g} s", peer=self._url) from e
        except httpx.TimeoutException as e:
            raise PeerError(f"{self._url} did not answer in time ({type(e).__name__})", peer=self._url) from e
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise PeerError(f"cannot reach {self._url}: {in_plain_words(e)}", peer=self._url) from e
        if answer.status_code != 200:
            raise answer_error(answer, path, self._url)
        found = json_of(answer)
        if not isinstance(found, dict):
            raise PeerError(f"{self._url}{path} is not a torpor server's answer", peer=self._url)
        return found

    def _refuse_router(self) -> None:
        """StateError when it is a router that does not know a route: it has no engine of its own."""
        stats = json_of(self._client.get(f"{self._url}/stats"))
        if isinstance(stats, dict) and {"prefill", "decode"} <= stats.keys():
            engines = [str(b.get("url")) for group in ("prefill", "decode") for b in stats[group]]
            message = f"{self._url}: this is a router; ask an engine ({', '.join(engines)})"
            raise StateError(message, state="router")


def json_of(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None


def error_fields(answer: httpx.Response) -> dict[str, Any]:
    """``message``, and ``code`` and ``param`` where the server says them."""
    found = json_of(answer)
    error = found.get("error") if isinstance(found, dict) else None
    if isinstance(error, dict) and "message" in error:
        return error
    if "html" in answer.headers.get("content-type", ""):
        return {"message": "a web page; another program listens there, or a proxy answers for the server"}
    return {"message": answer.text[:200]}


def answer_error(answer: httpx.Response, path: str, url: str) -> TorporError:
    """ConfigurationError for values that the server does not take: then an option was wrong."""
    error = error_fields(answer)
    message, code = in_our_words(str(error["message"]), url), error.get("code")
    if code == "engine_dead":
        return EngineDeadError(message)
    said = f"{path}: HTTP {answer.status_code}: {message}"
    if answer.status_code == 400:
        option = option_of(path, error.get("param"))
        return ConfigurationError(said if option is None else f"{said} ({option})", setting=option or "", value=None)
    if code == "missing_authorization":
        said += "; --admin-token-file FILE gives it"
    elif code == "invalid_authorization":
        said += ": the server was started with another --admin-token-file"
    return StateError(said, state=str(answer.status_code))


def option_of(path: str, param: object) -> str | None:
    """The option that set ``param``, a field of a request to ``path``."""
    field = str(param).partition(".")[0]
    if (path, field) == ("/sleep", "tags"):  # what a tag is unknown by; a sleep names them in its policies
        field = "policies"
    return OPTIONS.get(field)


def in_plain_words(error: Exception) -> str:
    """Why nobody could be asked. httpx has no words for a timeout, and OpenSSL its own for a server that speaks no TLS."""
    if "WRONG_VERSION_NUMBER" in str(error):
        return "the server does not speak TLS: write http://"
    return str(error) or type(error).__name__


def in_our_words(message: str, url: str) -> str:
    """A server's message names its routes; who typed a command has commands."""
    for route, command in COMMANDS:
        message = message.replace(route, f"`torpor {command.format(url=url)}`")
    return message


def with_scheme(url: str) -> str:
    """``localhost:8000`` is meant as http. ConfigurationError for what is no address of a server."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parsed = httpx.URL(whole)
    except httpx.InvalidURL as e:
        raise ConfigurationError(f"URL {url!r} is no address: {e}", setting="URL", value=url) from e
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigurationError(f"URL {url!r} is not like http://HOST:PORT", setting="URL", value=url)
    if parsed.path.rstrip("/").endswith("/v1"):  # what OpenAI's clients want
        raise ConfigurationError(f"URL {url!r}: leave out /v1, the commands add their routes", setting="URL", value=url)
    return whole.rstrip("/")
