"""A call at a later time: a simpy event that is its own callback, for machines without processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simpy


class Call(simpy.Event):
    """Call a function with one argument when it is due."""

    __slots__ = ("argument", "function")

    def __init__(self, environment: simpy.Environment, function: Callable[[Any], None], argument: Any) -> None:
        self.env = environment
        self.callbacks = [_invoke]
        self._ok, self._value = True, None
        self.function, self.argument = function, argument


def call_after(
    environment: simpy.Environment, seconds: float, function: Callable[[Any], None], argument: Any = None
) -> None:
    """Call ``function(argument)`` after some simulated seconds."""
    environment.schedule(Call(environment, function, argument), delay=seconds)


def _invoke(call: Any) -> None:
    call.function(call.argument)
