"""Commands as sections of configuration, and the one parser that reads them.

A command is a subclass of `Command`, in a module that imports no torch: its docstring is the help, its fields are the
options, and `run` does the work, with the imports that it needs. So help and refusals come at once.

    vqclip tokenize --batch-size 8 ...       sets the field `batch_size`
    vqclip report runs/a runs/b              words fill the fields of `words`, in their order; --runs names them, too
    vqclip train FILE.yaml optim.lr=3        key=value changes the configuration that the command reads (`keys`);
                                             where it reads none, it is another spelling of an option. A YAML file is
                                             that of --config, which need not be written

The same thing has the same name in each command: ``--out``, ``--device``, ``--data`` with paths and ``key=value``.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from vqclip.config import parse_config
from vqclip.config.messages import members
from vqclip.data.on_ray import Actors, Cpus, Gpus, RayOptions
from vqclip.errors import ConfigError
from vqclip.runlog.console import columns, fit_lines


def _not_empty(given: str) -> str:
    if not given.strip():  # an unset shell variable gives an empty text
        raise ValueError("expected a text that is not empty")
    return given


def _on_this_machine(given: Any) -> Any:
    if isinstance(given, str) and "://" in _not_empty(given):
        hint = "a run at a URL is copied to one by `vqclip copy-run URL FOLDER`"
        raise ValueError(f"expected a path on this machine; {hint}")
    return given


def _is_file(path: Path) -> Path:
    if path.is_dir():
        raise ValueError("expected a file, not a folder")
    return path


def require_page(path: Path) -> Path:
    """Return the path of a page that can be written; raise ValueError if it cannot."""
    if path.exists() and not path.is_file() and not path.is_dir():  # /dev/stdout, a pipe
        return path
    if path.suffix not in (".html", ".htm") or path.is_dir():
        raise ValueError("expected a file whose name ends in .html")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {path.absolute().parent}; expected a file in one that exists")
    return path


Text = Annotated[str, AfterValidator(_not_empty)]
"""A text that is not empty."""
LocalPath = Annotated[Path, BeforeValidator(_on_this_machine)]
"""A path that is not empty, which would be the current folder, and no URL."""
OutputFile = Annotated[LocalPath, AfterValidator(_is_file)]
Page = Annotated[LocalPath, AfterValidator(require_page)]
"""A page that can be written: its name ends in .html, unlike config.yaml."""
BatchSize = Annotated[int, Field(ge=1, le=2**16)]
Workers = Annotated[int, Field(ge=0, le=512)]
BadFraction = Annotated[float, Field(ge=0, lt=1)]
Precision = Literal["fp32", "bf16", "fp16"]

# Options that several commands have.
SOURCE = "file, folder, pattern or URL of the data"
SOURCE_KEYS = "keys of the source, such as kind=csv captions=title; see docs/data.md"
Source = Annotated[Text, Field(description=SOURCE)]
Tokenizer = Annotated[Text, Field(description="folder of a run or tokenizer, or hub name (owner/name)")]
MODEL = (
    "run folder (its exported tokenizer, else its newest checkpoint), checkpoint folder, exported tokenizer folder, or "
    "hub name (owner/name)"
)
Models = Annotated[tuple[Text, ...], Field(description=MODEL, min_length=1)]
DATA = (
    "file, folder, pattern or URL; others of the same data may follow, and keys of the kind, such as captions=title or "
    "split=test"
)
Data = Annotated[tuple[Text, ...], Field(description=DATA)]
Device = Annotated[Text, Field(description="cpu, cuda, cuda:1, ...; auto: a GPU if there is one")]
Weights = Annotated[
    Literal["averaged", "current"],
    Field(description="averaged: the moving average of the weights, if there is one (train.ema); current: the step's"),
]


class Command(BaseModel):
    """Options of a command. A last underscore of a field's name is not part of the option's."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )

    words: ClassVar[tuple[str, ...]] = ()
    """Fields that words fill, in this order; one that is a tuple takes the rest."""
    reads: ClassVar[str] = ""
    """Configuration that key=value changes, in words; empty: key=value sets fields."""
    takes_others: ClassVar[bool] = False
    """Whether options that are not fields go to `others`; they are refused otherwise."""
    failure: ClassVar[int] = 2
    """Exit status of errors other than `ConfigError`, whose status is 2."""
    after_interrupt: ClassVar[str] = ""
    """Remark on the state that Ctrl-C leaves behind."""

    def __init_subclass__(cls, **facts: Any) -> None:
        """Set what the class statement says: ``class Report(Command, words=("runs",)):``."""
        for name, value in facts.items():
            setattr(cls, name, value)

    task: str = ""
    """Second word of the command, such as zero-shot."""
    keys: tuple[str, ...] = ()
    """key=value for the configuration that the command reads."""
    others: tuple[str, ...] = ()
    """Options that are not fields."""
    given: tuple[str, ...] = ()
    """Arguments after the command's name."""

    def run(self) -> int | None:
        """Do the work, and return the exit status (None: 0)."""
        raise NotImplementedError


class OnRay(Command):
    """A command that can run on a Ray cluster."""

    engine: Literal["local", "ray"] = "local"
    """local: this process, or those of torchrun. ray: workers of Ray, on this machine or on a cluster whose machines
    share the output folder."""
    ray_address: Text | None = Field(None, description=RayOptions.model_fields["address"].description)
    ray_actors: Actors | None = Field(None, description=RayOptions.model_fields["actors"].description)
    ray_cpus: Cpus | None = Field(None, description=RayOptions.model_fields["cpus"].description)
    ray_gpus: Gpus | None = Field(None, description=RayOptions.model_fields["gpus"].description)

    @property
    def cluster(self) -> RayOptions | None:
        """Options of Ray; None for the local engine.

        Raises:
            ConfigError: options of Ray for the local engine.
        """
        given = {name: getattr(self, f"ray_{name}") for name in RayOptions.model_fields}
        if self.engine == "ray":
            return RayOptions(**given)
        if names := [f"--ray-{name}" for name, value in given.items() if value is not None]:
            raise ConfigError(f"{', '.join(names)}: got the local engine; expected --engine ray with it")
        return None


class Parser(argparse.ArgumentParser):
    """A parser whose errors suggest the option that was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with status 2."""
        if wrong := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            close = difflib.get_close_matches(wrong[1][:80], re.findall(r"--[\w-]+", self.format_usage()), n=1)
            if close:
                message += f'; did you mean "{close[0]}"?'
            elif "key=value" in self.format_usage():
                message += f"; keys of the configuration are written {wrong[1].lstrip('-').replace('-', '_')}=..."
        self.print_usage(sys.stderr)
        self.exit(2, fit_lines(f"{self.prog}: error: {message}") + "\n")


def make_parser(name: str, command: type[Command], listing: str = "") -> Parser:
    """Return the parser of a command; without the options that are not given, its result has no such attribute.

    Args:
        name: words of the command, such as ``data pack``.
        command: its class.
        listing: lines that describe the words that may follow the name; empty for none.
    """
    about, _, examples = (inspect.getdoc(command) or "").partition("\n\nExamples:\n")
    # Lines of a paragraph are joined, unless they are a table.
    about = "\n\n".join(each if "  " in each else textwrap.fill(each, columns()) for each in about.split("\n\n"))
    if listing:
        about += f"\n\na task may follow:\n\n{listing}"
    rows = {each.rstrip("_").upper(): _describe(command.model_fields[each]) for each in command.words}
    if command.reads:
        rows["key=value"] = command.reads
    parser = Parser(
        prog=f"vqclip {name}",
        description=about,
        epilog=f"examples:\n{examples}" if examples else None,
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, width=columns()),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=not command.takes_others,
    )
    for key in sorted(command.model_fields, key=lambda key: key not in command.__annotations__):  # its own first
        field = command.model_fields[key]
        if key in Command.model_fields or (key in command.words and command.takes_others):
            continue
        flag = key.rstrip("_").replace("_", "-")
        flags = [f"-{flag}", f"--{flag}"] if len(flag) == 1 else [f"--{flag}"] + ["-o"] * (flag in ("out", "output"))
        kind, told = field.annotation, argparse.SUPPRESS if key in command.words else _describe(field)
        settings = dict[str, Any](dest=key, help=told)
        if kind is bool:
            parser.add_argument(*flags, action="store_true", **settings)
            continue
        is_list = get_origin(kind) is tuple
        if is_list:
            kind = get_args(kind)[0]
            settings |= {"nargs": "+", "action": "append" if get_origin(kind) is tuple else "extend"}
        choices = [choice for each in members(kind) for choice in get_args(each) if get_origin(each) is Literal]
        is_number = not {str, Path} & {*members(kind)} and get_origin(kind) is not tuple
        shown = "{" + ",".join(choices) + "}" if choices else "N" if is_number else "TEXT"
        settings["metavar"] = (shown, "CHOICE") if choices and is_list else shown
        parser.add_argument(*flags, **settings)
    if rows or not command.takes_others:  # otherwise a word is the value of an option that is passed on
        explained = "; ".join(f"{word}: {text}" for word, text in rows.items()) or "another spelling of an option"
        parser.add_argument("words", nargs="*", metavar=" ".join(rows) or "key=value", help=explained)
    return parser


def _describe(field: FieldInfo) -> str:
    """Return the description of a field, and its default where it says something."""
    text = " ".join((field.description or "").split()).removesuffix(".")
    default = "required" if field.is_required() else field.default
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    is_told = shown is not None and shown is not False and shown != ""
    return (f"{text} ({shown})" if is_told else text).replace("%", "%%")


def read_options(name: str, command: type[Command], arguments: Sequence[str], listing: str = "") -> Command:
    """Read the arguments of a command; words and key=value may follow options.

    Raises:
        SystemExit: with status 0 for --help, 2 for arguments that cannot be read; help or mistake have been printed.
        ConfigError: a value is missing or wrong.
    """
    parser, others = make_parser(name, command, listing), list[str]()
    own = re.compile(f"--({'|'.join(command.model_fields)})(?==|$)")
    dashed = [own.sub(lambda found: found[0].replace("_", "-"), each) for each in arguments]  # --batch_size too
    if command.takes_others:
        found, others = parser.parse_known_intermixed_args(dashed)
    else:
        found = parser.parse_intermixed_args(dashed)
    options = vars(found)
    fields, values, given = command.model_fields, dict[str, Any](), options.pop("words", [])
    words, keys = paths_and_overrides(given)
    files = [word for word in words if word.lower().endswith((".yaml", ".yml"))]
    if files and "config" in fields and "config" not in options:
        options["config"] = files[0]
        words.remove(files[0])
    if "source" in fields and given and given[0].startswith("kind="):  # data without a path, such as kind=scenes
        words.insert(0, keys.pop(0))
    for key in command.words:
        if key in options:
            continue
        takes_rest = get_origin(fields[key].annotation) is tuple
        taken = len(words) if takes_rest else 1
        if words[:taken]:
            values[key] = words[:] if takes_rest else words[0]
        del words[:taken]
        if key not in values and fields[key].is_required():
            for option, value in options.items():
                several = value[-1] if isinstance(value, list) and isinstance(value[-1], list) else value
                if isinstance(several, list) and len(several) > 1:
                    took = f"--{option.replace('_', '-')} took {' '.join(several)}"
                    raise ConfigError(f"{key}: missing; {took}: write what comes without an option first")
    if words and not others:  # what follows an unknown option may be its value
        needed = [key for key, field in fields.items() if field.is_required() and key not in command.words]
        needed = [f"--{key.replace('_', '-')}" for key in needed]
        others_ = f"; {', '.join(needed)} {'is an option' if len(needed) == 1 else 'are options'}" if needed else ""
        expected = "section.key=value" if command.reads else f"no further word{others_}"
        raise ConfigError(f"got {words[0]!r}; expected {expected}")
    values |= options
    if not command.reads:
        pairs = (each.partition("=")[::2] for each in keys)
        values |= {f"{key}_" if f"{key}_" in fields else key: text for key, text in pairs}
    values |= {"task": name.partition(" ")[2], "others": others, "given": list(arguments)}
    return parse_config(command, values | ({"keys": keys} if command.reads else {}))


_OVERRIDE = re.compile(r"[a-z_][a-z0-9_]*(\[\d+\])?(\.[a-z_][a-z0-9_]*(\[\d+\])?)*=")


def paths_and_overrides(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide models, or the values of ``--data``, into paths and ``key=value`` of their configuration."""
    overrides = [each for each in given if _OVERRIDE.match(each)]
    return [each for each in given if each not in overrides], overrides


def local_path(path: str) -> str | None:
    """Return an absolute path for local files or patterns; None for a URL or a hub name."""
    found = Path(path).expanduser().absolute()
    return str(found) if found.exists() or (any(mark in path for mark in "{*") and "://" not in path) else None
