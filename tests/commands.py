"""Commands as functions of their arguments."""

from collections.abc import Callable, Sequence

from vqclip.cli.main import main


def command(name: str) -> Callable[[Sequence[str]], int]:
    """Return ``vqclip NAME`` as a function of the arguments that follow it."""
    return lambda arguments: main([name, *arguments])
