"""The OpenAI-compatible HTTP server: ``create_app`` for an application, ``run_server`` for a process."""

from torpor.server.app import create_app
from torpor.server.config import ServerConfig
from torpor.server.run import run_server

__all__ = ["ServerConfig", "create_app", "run_server"]
