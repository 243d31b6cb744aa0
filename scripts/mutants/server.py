"""The doors of HTTP, and what they say of a sleeping engine (E10)."""

from __future__ import annotations

from mutants.mutant import Mutant

ADMIN = "src/torpor/server/admin.py"
AUTH = "src/torpor/server/auth.py"
CONNECTOR_AUTH = "src/torpor/connectors/auth.py"
CONTEXT = "src/torpor/server/context.py"
ERRORS = "src/torpor/web/errors.py"
HEALTH = "src/torpor/server/health_routes.py"
MIDDLEWARE = "src/torpor/web/middleware.py"
ADMIN_TESTS = "tests/unit/test_server_admin.py::"
ERROR_TESTS = "tests/unit/test_server_errors.py::"
OPEN_DOORS = "src/torpor/cli/open_doors.py"
WARNING_TESTS = "tests/unit/test_cli_warnings.py::"

MUTANTS = (
    Mutant(
        "open-doors-are-silent",
        OPEN_DOORS,
        'return is_loopback(urlsplit(url).hostname or "")',
        "return True",
        "a model is open to the network, and nobody was told",
        WARNING_TESTS + "test_a_server_that_others_reach_says_what_is_open",
    ),
    Mutant(
        "secrets-of-all-are-silent",
        CONNECTOR_AUTH,
        "stat.S_IROTH | stat.S_IWOTH",
        "stat.S_IWOTH",
        "every user of the machine reads the admin token",
        WARNING_TESTS + "test_a_secret_that_everybody_can_get_at",
    ),
    Mutant(
        "admin-door-open",
        AUTH,
        "        else:\n            check_local(request)\n",
        "",
        "anybody on the network puts the engine to sleep",
        ADMIN_TESTS + "test_without_a_token_only_this_machine_opens",
    ),
    Mutant(
        "admin-door-open-to-proxies",
        AUTH,
        "if any(name in request.headers for name in FORWARDING_HEADERS):",
        "if all(name in request.headers for name in FORWARDING_HEADERS):",
        "anybody behind a proxy on this machine is an administrator",
        ADMIN_TESTS + "test_without_a_token_neither_a_proxy_nor_a_page_opens",
    ),
    Mutant(
        "admin-door-open-to-pages",
        AUTH,
        'if "origin" in request.headers:',
        'if "origin" in FORWARDING_HEADERS:',
        "a page in a browser on this machine puts the engine to sleep",
        ADMIN_TESTS + "test_without_a_token_neither_a_proxy_nor_a_page_opens",
    ),
    Mutant(
        "half-a-token-opens",
        AUTH,
        "if not hmac.compare_digest(given.strip().encode(), expected.encode()):",
        "if not expected.startswith(given.strip()):",
        "the first letter of the token is enough",
        ADMIN_TESTS + "test_with_a_token_only_the_token_opens",
    ),
    Mutant(
        "e10-retry-after-removed",
        ERRORS,
        'headers = {"Retry-After": retry_after(error)} if row.retry else {}',
        "headers: dict[str, str] = {}",
        "clients do not know when to come back",
        ERROR_TESTS + "test_e10_asleep_says_when_to_come_back_in_whole_seconds",
    ),
    Mutant(
        "e10-ready-while-asleep",
        HEALTH,
        "if state is EngineState.AWAKE:",
        "if state is not EngineState.DEAD:",
        "a balancer sends requests to a sleeping engine",
        ADMIN_TESTS + "test_e10_asleep_it_is_alive_not_ready_and_says_when_to_come_back",
    ),
    Mutant(
        "e10-a-hung-core-is-healthy",
        CONTEXT,
        "if silent_s > self.config.health_timeout_s:",
        "if silent_s < 0:",
        "nobody restarts an engine that hangs, and its requests wait in vain",
        ADMIN_TESTS + "test_health_of_an_engine_that_is_dead_or_does_not_answer",
    ),
    Mutant(
        "e7-tags-are-dropped-on-the-way",
        ADMIN,
        "return await context.client.wake_up(tags or None)",
        "return await context.client.wake_up(None)",
        "a partial wake maps everything",
        ADMIN_TESTS + "test_e7_a_partial_wake_does_not_serve",
    ),
    Mutant(
        "no-tags-are-all-tags",
        ADMIN,
        "if values and not all(tags):",
        "if values and not any(tags):",
        "a slip of the pen wakes something else",
        ADMIN_TESTS + "test_tags_that_name_nothing",
    ),
    Mutant(
        "body-limit-by-length-only",
        MIDDLEWARE,
        "if seen > self._max_bytes:",
        "if seen < 0:",
        "a body in chunks takes all memory",
        ERROR_TESTS + "test_a_body_over_the_limit_is_413_with_and_without_a_length",
    ),
    Mutant(
        "foreign-errors-are-shown",
        ERRORS,
        'message = f"internal error ({type(error).__name__}); the server\'s log has it"',
        'message = f"internal error ({error}); the server\'s log has it"',
        "paths and secrets reach clients",
        ERROR_TESTS + "test_a_foreign_exception_gives_nothing_away",
    ),
)
