"""``torpor demo``: a prefill engine, a decode engine and a router on this machine, asked, put to sleep, woken, asked again."""

from torpor.demo.run import DemoConfig, run_demo
from torpor.demo.unfollowed import run_unfollowed

__all__ = ["DemoConfig", "run_demo", "run_unfollowed"]
