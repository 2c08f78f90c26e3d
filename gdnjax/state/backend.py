"""What steps a state: two pure functions, and the state layouts that they can work on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from gdnjax.config import Config, ConfigError


@dataclasses.dataclass(frozen=True)
class Backend:
    """A `prefill` and a `decode_step` (see `gdnjax.model.step`), and where they may write.

    `layouts`: values of `state_layout`. Functions whose decode rule writes the slot that it read, and can
    do nothing else, take `("in_place",)`.
    """

    name: str
    prefill: Callable[..., Any]
    decode_step: Callable[..., Any]
    layouts: tuple[str, ...] = ("in_place", "twin")

    def bind(self, config: Config) -> None:
        """Refuses a config that these functions cannot serve.

        Raises:
            ConfigError: another state layout than they take.
        """
        if config.state_layout not in self.layouts:
            takes = " or ".join(map(repr, self.layouts))
            raise ConfigError(
                f"state_layout = {config.state_layout!r}; the backend {self.name!r} takes {takes}: it updates a "
                "slot where it read it. Change state_layout (also in platform_overrides), or use another backend"
            )
