"""What steps a state: a few pure functions, and the state layouts that they can work on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from gdnjax.config import Config, ConfigError


@dataclasses.dataclass(frozen=True)
class Backend:
    """A `prefill` and a `decode_step` (see `gdnjax.model.step`), and where they may write.

    * `verify_step`: what takes the place of `decode_step` under speculation (see `gdnjax.model.verify`); None: nothing
      does.
    * `layouts`: values of `state_layout`. Functions whose decode rule writes the slot that it read, and can
      do nothing else, take `("in_place",)`.
    """

    name: str
    prefill: Callable[..., Any]
    decode_step: Callable[..., Any]
    verify_step: Callable[..., Any] | None = None
    layouts: tuple[str, ...] = ("in_place", "twin")

    def bind(self, config: Config) -> None:
        """Refuses a config that these functions cannot serve.

        Raises:
            ConfigError: another state layout than they take, or speculation without a `verify_step`.
        """
        if config.speculate and self.verify_step is None:
            raise ConfigError(
                f"speculate = {config.speculate}; the backend {self.name!r} takes 0: it cannot verify drafts. Change "
                "speculate (also in platform_overrides), or use another backend"
            )
        if config.state_layout not in self.layouts:
            takes = " or ".join(map(repr, self.layouts))
            raise ConfigError(
                f"state_layout = {config.state_layout!r}; the backend {self.name!r} takes {takes}: it updates a "
                "slot where it read it. Change state_layout (also in platform_overrides), or use another backend"
            )
