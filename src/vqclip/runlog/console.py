"""Terminal output and log files of commands: log lines, results, and the error that ends a command."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from vqclip.errors import VqclipError, printable

_MOST_COLUMNS = 100
_TIMED = "%(asctime)s %(mark)s%(message)s"
_output = logging.getLogger("vqclip.output")
_output.propagate = False
_output.setLevel(logging.INFO)
_output.addHandler(logging.NullHandler())
_package = logging.getLogger("vqclip")


def columns() -> int:
    """Return the width of output: that of the terminal, from 40 to 100 columns; 100 without a terminal."""
    return max(40, min(_MOST_COLUMNS, shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns))


def fit_lines(text: str) -> str:
    """Break lines that are longer than `columns` between words; words are not broken, so that paths stay whole.

    The rest of a line is indented below the text behind its time or its label (``  speed       701 images/s``).
    """
    most, lines = columns(), list[str]()
    for line in text.split("\n"):
        if len(line) <= most:
            lines.append(line)
            continue
        found = re.match(r" *(\d\d:\d\d:\d\d |[^ ]+ {2,}(?=[^ ]))?", line)
        label = "" if found is None or found.end() > most // 2 else found[0]
        indent = len(label) if label.strip() else len(label) + 2
        lines += textwrap.wrap(
            line, most, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


class PrintableFormatter(logging.Formatter):
    """Formatter that escapes control characters, which a path or a caption may contain; see `printable`.

    Args:
        form: format of a line, as in `logging.Formatter`; ``%(mark)s`` is ``warning: `` or ``error: `` where it is one.
        mask: function applied to each line first, such as one that hides credentials.
        dates: format of times.
        fits: whether long lines are broken; see `fit_lines`.
    """

    def __init__(
        self, form: str, mask: Callable[[str], str] = str, dates: str = "%Y-%m-%d %H:%M:%S", fits: bool = False
    ):
        super().__init__(form, dates)
        self._mask, self._fits = mask, fits

    def format(self, record: logging.LogRecord) -> str:
        """Return the line or lines of a record."""
        record.mark = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        text = printable(self._mask(super().format(record)))
        return fit_lines(text) if self._fits else text


class _Unfailing:
    """Text stream that drops failing writes: the first failure redirects it to the null device."""

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
        """Send the buffered and all later text to the null device."""
        null = os.open(os.devnull, os.O_WRONLY)
        with contextlib.suppress(OSError):  # it has no descriptor
            os.dup2(null, self.stream.fileno())
        os.close(null)


@contextlib.contextmanager
def unfailing_streams() -> Iterator[None]:
    """Ignore failing writes to stdout and stderr within the block; also a decorator. See `print_output` for results.

    A closed pipe, a full disk or a dead terminal silences the stream; characters that it cannot encode are escaped. A
    stream that was closed when the process started becomes the null device; otherwise the next opened file would get
    its number.
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
        sys.stdout.flush()  # now: a failure at the interpreter's end would become the exit status
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def print_output(text: str, *, for_programs: bool = False) -> None:
    """Print a command's result, such as a table, to stdout. A closed pipe, as after `head`, is not an error.

    Args:
        text: the result; long lines are broken, see `fit_lines`.
        for_programs: whether programs read it, so that no line is broken: JSON, YAML, a path.

    Raises:
        OSError: it cannot be written.
    """
    stream = sys.stdout if isinstance(sys.stdout, _Unfailing) else _Unfailing(sys.stdout)
    try:
        print(text if for_programs else fit_lines(text), file=stream.stream, flush=True)
    except OSError as error:
        stream.give_up()
        if not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, "standard output") from error


class _AboveBar(logging.StreamHandler):  # Python 3.10 has no StreamHandler[TextIO]
    """Handler that writes lines above a progress bar, where one is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm = sys.modules.get("tqdm")  # not imported for commands without a bar
        with contextlib.nullcontext() if tqdm is None else tqdm.tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def log_to_stderr(mask: Callable[[str], str]) -> None:
    """Log to stderr what vqclip reports: all of it on rank 0, warnings and errors on the others.

    Of other packages only errors are shown: a client of a store would report each request. Lines have times if stderr
    is not a terminal, and at most `columns`. ``mask`` is that of `PrintableFormatter`. Does nothing in a program that
    has set up logging itself.
    """
    if logging.getLogger().handlers:
        return
    handler = _AboveBar()
    form = _TIMED.partition(" ")[2] if sys.stderr.isatty() else _TIMED
    handler.setFormatter(PrintableFormatter(form, mask, "%H:%M:%S", fits=True))
    handler.addFilter(lambda record: record.levelno >= logging.ERROR or record.name.partition(".")[0] == "vqclip")
    logging.getLogger().addHandler(handler)
    _package.setLevel(_level(int(os.environ.get("RANK", "0"))))
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def _level(rank: int) -> int:
    return logging.INFO if rank == 0 else logging.WARNING


class _File(logging.handlers.WatchedFileHandler):  # makes the file again if it is deleted
    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # it cannot be opened
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Stop writing to a file that fails, as on a full disk; this must not end a run."""
        if not isinstance(sys.exc_info()[1], OSError):
            return super().handleError(record)
        for logger in (logging.getLogger(), _output, _package):
            logger.removeHandler(self)
        logging.getLogger(__name__).warning("%s: cannot be written; logging to it ends", self.baseFilename)


class _ToRoot(logging.Handler):
    """Pass on what a logger would have propagated before its level was lowered."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger().handle(record)


class LogFile:
    """``train.log`` in a run's folder: the log of rank 0 with times; a restart appends to it.

    Other ranks' warnings and errors go to ``train.rank1.log`` and so on. A file that cannot be written does not end the
    run. The error that ends the context is written too. The file does not depend on the level that the program has set:
    what this level hides elsewhere stays hidden there.

    Args:
        folder: of the run.
        mask: as in `PrintableFormatter`.
        rank: of this process.
    """

    def __init__(self, folder: Path, mask: Callable[[str], str], rank: int = 0):
        name = "train.log" if rank == 0 else f"train.rank{rank}.log"
        self._handler = _File(folder.absolute() / name, encoding="utf-8", delay=True)
        self._handler.setLevel(_level(rank))
        self._handler.setFormatter(PrintableFormatter(_TIMED, mask))
        self._before: tuple[int, bool, _ToRoot] | None = None

    def open(self) -> None:
        """Start to write."""
        for logger in (logging.getLogger(), _output):
            logger.addHandler(self._handler)
        if not _package.isEnabledFor(self._handler.level):
            to_root = _ToRoot(_package.getEffectiveLevel())
            self._before = _package.level, _package.propagate, to_root
            _package.addHandler(self._handler)
            _package.addHandler(to_root)
            _package.setLevel(self._handler.level)
            _package.propagate = False

    def __enter__(self) -> LogFile:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (VqclipError, OSError)):
            log_to_file(_message(error), logging.ERROR)
        elif error is not None:
            _output.error("ended by %s", type(error).__name__, exc_info=error)
        for logger in (logging.getLogger(), _output, _package):
            logger.removeHandler(self._handler)
        if self._before is not None:
            level, _package.propagate, to_root = self._before
            _package.setLevel(level)
            _package.removeHandler(to_root)
        with contextlib.suppress(OSError):
            self._handler.close()


def log_to_file(text: str, level: int = logging.INFO) -> None:
    """Write to the open `LogFile` only: for text that the terminal gets in another form."""
    _output.log(level, "%s", text)


def print_and_log(text: str) -> None:
    """Print to stdout, and write to the open `LogFile`."""
    print(fit_lines(text), flush=True)
    log_to_file(text)


def _message(error: Exception) -> str:
    """Return the message of an error; for errors of the system, file and reason without the number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def print_error(program: str, error: Exception, mask: Callable[[str], str]) -> None:
    """Print the error that ends a command, with the rank if there are several; ``mask`` as above."""
    who = f"{program}: rank {os.environ['RANK']}" if "RANK" in os.environ else program
    text = printable(mask(_message(error)))
    print(fit_lines(who + (":\n" if "\n" in text else ": ") + text), file=sys.stderr)


def print_interrupt(program: str, left: str = "") -> int:
    """Print that Ctrl-C ended a command, and what is ``left`` of it; return the exit status."""
    print(fit_lines(f"{program}: interrupted{left and '; '}{left}"), file=sys.stderr)
    return 130
