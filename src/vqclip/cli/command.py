"""Shared frame of the commands: errors become one line on stderr and an exit status."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

from vqclip.data import mask_credentials
from vqclip.errors import ConfigError, VqclipError
from vqclip.runlog.console import print_error, print_interrupt, unfailing_streams


class Main(Protocol):
    """Entry point of a command."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        """Run the command with ``arguments`` (None: those of the process) and return its exit status."""
        ...


def command(
    program: str, *, failure: int = 2, after_interrupt: str = ""
) -> Callable[[Callable[..., int | None]], Main]:
    """Decorate the ``main(arguments)`` of a command.

    The decorated function returns the exit status: 0 or what ``main`` returns; 2 for a `ConfigError`; ``failure`` for
    another `VqclipError` or an `OSError`; 130 for Ctrl-C. Credentials in messages are masked.

    Args:
        program: name of the command, which begins every message.
        failure: exit status of errors other than `ConfigError`.
        after_interrupt: remark on the state that Ctrl-C leaves behind.
    """

    def decorate(main: Callable[..., int | None]) -> Main:
        @functools.wraps(main)
        def run(arguments: Sequence[str] | None = None) -> int:
            with unfailing_streams():
                try:
                    return main(arguments) or 0
                except (VqclipError, OSError) as error:  # an OSError: a full disk, a folder without write permission
                    print_error(program, error, mask_credentials)
                    return 2 if isinstance(error, ConfigError) else failure
                except KeyboardInterrupt:
                    return print_interrupt(program, after_interrupt)

        return run

    return decorate
