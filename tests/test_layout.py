"""The shape of the package: who may import whom, and what an import may start."""

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "vqclip"

# Each layer may import from the layers above it. Parts of one layer do not import each other, save within a folder.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "seeds"),
    ("io",),
    ("config", "checkpoint"),
    ("nn",),
    ("dist",),
    ("process",),
    ("scenes",),
    ("data", "lm_vocabulary", "losses", "quantizers", "towers"),
    ("pixels",),
    ("tokenizer",),
    ("model",),
    ("evaluation", "export", "search"),
    ("runlog",),
    ("report",),
    ("tokenize_dataset", "train"),
    ("integrations", "data_tools", "demo"),
    ("cli",),
    ("__main__",),
)
# Losses see embeddings and nothing else.
ONLY = {"losses": {"errors", "config", "dist", "nn"}}

ROOT_NAMES = ("__version__", "lazy_getattr")
FILES = sorted(SOURCE.rglob("*.py"))
DOORS = {"vqclip.train.__main__"}
"""Lead from ``python -m`` to the command line, and hold nothing else."""

parse = functools.cache(ast.parse)


def part_of(module: str) -> str:
    """``vqclip.data.order`` -> ``data``."""
    return module.split(".")[1] if "." in module else ""


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def imports_of(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Every module or name that the source imports, also inside functions and for type checkers alone."""
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                package = parents[: len(parents) - node.level + is_package]
                base = ".".join([*package, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def breaches(source: str, module: str, is_package: bool = False) -> list[str]:
    """What breaks the import order in one file."""
    part = part_of(module)
    layer_of = {name: number for number, names in enumerate(LAYERS) for name in names}
    found = []
    for imported in imports_of(source, module, is_package):
        other = part_of(imported)
        if imported.split(".")[0] != "vqclip" or other in ("", part, *ROOT_NAMES) or not part:
            continue
        above = {name for name, layer in layer_of.items() if layer < layer_of.get(part, 0)}
        if other not in ONLY.get(part, above):
            found.append(f"{module} imports {imported}")
    return found


def test_imports_go_one_way_and_every_part_has_its_layer():
    parts = {part_of(module_of(file)) for file in FILES} - {""}
    assert parts <= {name for names in LAYERS for name in names}
    found = []
    for file in FILES:
        if module_of(file) in DOORS:
            assert len(file.read_text().splitlines()) < 10
        else:
            found += breaches(file.read_text(), module_of(file), file.name == "__init__.py")
    assert found == []


def test_no_module_imports_itself_by_way_of_others():
    known = {module_of(file): file for file in FILES}
    graph = {}
    for module, file in known.items():
        names = imports_of(file.read_text(), module, file.name == "__init__.py")
        graph[module] = {each if each in known else each.rpartition(".")[0] for each in names} & known.keys()
    graph["vqclip"] = set()  # its names are imported on first use
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def test_only_dist_talks_to_torch_distributed():
    """In code; comments and docstrings may speak of it."""
    found = []
    for file in (file for file in FILES if part_of(module_of(file)) != "dist"):
        names = set(imports_of(file.read_text(), module_of(file), file.name == "__init__.py"))
        for node in ast.walk(parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                names |= {f"torch.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute):
                names.add(ast.unparse(node))
        theirs = [name for name in names if name.startswith(("torch.distributed", "torch.nn.parallel"))]
        found += [f"{module_of(file)} uses {name}" for name in theirs]
    assert found == []


STEPS = [
    ("import vqclip", ["torch", "webdataset", "open_clip", "timm", "pydantic", "yaml"]),
    ("import vqclip.cli.main as it; it.main(['--help'])", ["torch", "webdataset", "open_clip", "timm", "pydantic"]),
    ("import vqclip.config", ["torch", "webdataset", "open_clip", "timm"]),
    ("import vqclip.data", ["webdataset", "open_clip", "timm"]),
    (
        "import vqclip.runlog.metrics; vqclip.load_tokenizer",
        ["webdataset", "open_clip", "timm", "tensorboard", "torchmetrics", "matplotlib", "jinja2"],
    ),
]
"""What is imported, one after the other, and what is not to be imported by then."""
CHEAP = f"""
import sys
for step, heavy in {STEPS}:
    exec(step)
    found = [name for name in heavy if name in sys.modules]
    assert not found, (step, found)
distributed = sys.modules.get("torch.distributed")
assert distributed is None or not distributed.is_available() or not distributed.is_initialized()
"""


def test_import_is_cheap_and_starts_nothing():
    done = subprocess.run([sys.executable, "-c", CHEAP], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_version_and_public_names():
    import vqclip

    assert vqclip.__version__.split(".")[0].isdecimal()
    assert sorted(vqclip.__all__) == dir(vqclip)
    assert all(hasattr(vqclip, name) for name in vqclip.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        vqclip.nothing  # noqa: B018
