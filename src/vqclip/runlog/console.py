"""Terminal output and log files of commands: log lines, products, and the error that ends a command."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from vqclip.errors import VqclipError, printable

_TIMED = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
_said = logging.getLogger("vqclip.said")
_said.propagate = False
_said.setLevel(logging.INFO)
_said.addHandler(logging.NullHandler())


class PrintableFormatter(logging.Formatter):
    """Writes log lines so that nothing in them, a path or a caption, can steer the terminal; see `printable`.

    Args:
        form: of a line, as `logging.Formatter` has it.
        mask: what to make of each line before.
    """

    def __init__(self, form: str, mask: Callable[[str], str] = str):
        super().__init__(form, "%Y-%m-%d %H:%M:%S")
        self._mask = mask

    def format(self, record: logging.LogRecord) -> str:
        """The line, or lines, of a record."""
        return printable(self._mask(super().format(record)))


class _Unfailing:
    """A text stream whose failing writes are dropped: the first failure redirects it to the null device."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self.dropping_errors():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self.dropping_errors():
            self.stream.flush()

    @contextlib.contextmanager
    def dropping_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self.give_up()

    def give_up(self) -> None:
        """Send what is buffered, and all that follows, to the null device."""
        null = os.open(os.devnull, os.O_WRONLY)
        with contextlib.suppress(OSError):  # it has no descriptor
            os.dup2(null, self.stream.fileno())
        os.close(null)


@contextlib.contextmanager
def unfailing_streams() -> Iterator[None]:
    """Ignore failing writes to stdout and stderr within the block; also a decorator. See `print_output` for results.

    A closed pipe, a full disk or a dead terminal silences the stream; characters that it cannot encode are escaped. A
    stream that was closed when the process started is the null device, lest the next file that is opened takes its
    place.
    """
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(null)
    before = sys.stdout, sys.stderr
    for name, stream in zip(("stdout", "stderr"), before, strict=True):
        stream = stream or open(os.devnull, "w")  # noqa: SIM115
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, stream if isinstance(stream, _Unfailing) else _Unfailing(stream))
    try:
        yield
    finally:
        sys.stdout.flush()  # now: a failure when the interpreter ends would become its exit status
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def print_output(text: str) -> None:
    """Print a command's product, such as a table, to stdout. A reader who has left, as `head` does, is no error.

    Raises:
        OSError: it cannot be written.
    """
    stream = sys.stdout if isinstance(sys.stdout, _Unfailing) else _Unfailing(sys.stdout)
    try:
        print(text, file=stream.stream, flush=True)
    except OSError as error:
        stream.give_up()
        if not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, "standard output") from error


def log_to_stderr(mask: Callable[[str], str]) -> None:
    """Let rank 0 tell what it does, and the others only what went wrong; ``mask`` as in `PrintableFormatter`.

    Lines have times where stderr is no terminal.
    """
    handler = logging.StreamHandler()
    form = "%(levelname).1s %(name)s: %(message)s" if sys.stderr.isatty() else _TIMED
    handler.setFormatter(PrintableFormatter(form, mask))
    logging.basicConfig(level=_level(), handlers=[handler])


def _level() -> int:
    return logging.INFO if _rank() == 0 else logging.WARNING


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


class _File(logging.handlers.WatchedFileHandler):  # comes back when it is deleted
    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # it cannot be opened
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Write no more to a file that fails, as on a full disk: that must not end a run."""
        if not isinstance(sys.exc_info()[1], OSError):
            return super().handleError(record)
        logging.getLogger().removeHandler(self)
        _said.removeHandler(self)
        logging.getLogger(__name__).warning("%s: cannot be written, and is left as it is", self.baseFilename)


class LogFile:
    """``train.log`` in a run's folder: all that rank 0 says, with times, appended from one start to the next.

    Other ranks' warnings and errors go to ``train.rank1.log`` and so on. A file that cannot be written is left alone.
    The error that ends the context is written as well.

    Args:
        folder: the run's.
        mask: as in `PrintableFormatter`.
    """

    def __init__(self, folder: Path, mask: Callable[[str], str]):
        name = "train.log" if _rank() == 0 else f"train.rank{_rank()}.log"
        self._handler = _File(folder.absolute() / name, encoding="utf-8", delay=True)
        self._handler.setLevel(_level())
        self._handler.setFormatter(PrintableFormatter(_TIMED, mask))

    def open(self) -> None:
        """Write from now on."""
        for logger in (logging.getLogger(), _said):
            logger.addHandler(self._handler)

    def __enter__(self) -> LogFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, (VqclipError, OSError)):
            log_to_file(_told(error), logging.ERROR)
        elif error is not None:
            _said.error("ended by %s", kind.__name__ if kind else "", exc_info=error)
        for logger in (logging.getLogger(), _said):
            logger.removeHandler(self._handler)
        with contextlib.suppress(OSError):
            self._handler.close()


def log_to_file(text: str, level: int = logging.INFO) -> None:
    """Write into the `LogFile` alone, if there is one: for what the screen gets in another form."""
    _said.log(level, "%s", text)


def print_and_log(text: str) -> None:
    """Print to stdout, and into the `LogFile` if there is one."""
    print(text, flush=True)
    log_to_file(text)


def _told(error: Exception) -> str:
    """What an error says; of the system's, the file first and no number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def print_error(program: str, error: Exception, mask: Callable[[str], str]) -> None:
    """Write the error that ends a command, with its rank where there are several; ``mask`` as above."""
    who = f"{program}: rank {os.environ['RANK']}" if "RANK" in os.environ else program
    text = printable(mask(_told(error)))
    print(f"{who}: {type(error).__name__}:\n{text}" if "\n" in text else f"{who}: {text}", file=sys.stderr)


def print_interrupt(program: str, left: str = "") -> int:
    """Write that Ctrl-C ended a command, and what is ``left`` of it; returns its exit status."""
    print(f"{program}: interrupted{left and '; '}{left}", file=sys.stderr)
    return 130
