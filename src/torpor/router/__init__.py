"""The prefill/decode proxy: ``create_app`` for an application, ``run_router`` for a process."""

from torpor.router.app import Router, RouterStats, create_app
from torpor.router.config import RouterConfig
from torpor.router.run import run_router

__all__ = ["Router", "RouterConfig", "RouterStats", "create_app", "run_router"]
