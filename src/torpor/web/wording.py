"""The engine's errors name Python calls and settings; over HTTP they name routes, and options of ``torpor serve``."""

from __future__ import annotations

from torpor.errors import ConfigurationError, StateError, TorporError

# The longer before what they contain. A phrase that no engine error has any more fails a test.
ROUTES_AND_OPTIONS: tuple[tuple[str, str], ...] = (
    ("sleep(level=0)", "POST /sleep?level=0"),
    ("wake_up()", "POST /wake_up"),
    ("pause()", "POST /pause"),
    ("resume()", "POST /resume"),
    ("start with enable_sleep_mode=False", "start without --enable-sleep-mode"),
    ("enable_sleep_mode=True", "--enable-sleep-mode"),
    ("enable_pools=True", "--enable-pools"),
    ("while_asleep='wait' or 'wake'", "--while-asleep wait or wake"),
)


def http_message(error: TorporError) -> str:
    """What ``error`` says, for somebody who has a URL and no object. Only of errors about a state or a setting: others may quote
    what a client sent."""
    message = error.message
    if isinstance(error, (StateError, ConfigurationError)):
        for phrase, words in ROUTES_AND_OPTIONS:
            message = message.replace(phrase, words)
    return message
