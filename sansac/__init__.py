"""sansac: soft actor-critic with a dense or a spiking actor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sansac.config import Config, ConfigError

if TYPE_CHECKING:
    from sansac.manager import Manager

__all__ = ["Config", "ConfigError", "Manager"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Manager brings torch and gymnasium; they load when it is asked for.
    if name == "Manager":
        from sansac.manager import Manager

        return Manager
    raise AttributeError(f"module 'sansac' has no attribute {name!r}")
