"""Hook of mkdocs: adds every decision record to the navigation."""

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Fill the section `Decisions` with the files of docs/adr, by their numbers."""
    files = sorted(Path(config.docs_dir, "adr").glob("[0-9]*.md"))
    for section in config.nav:
        if "Decisions" in section:
            section["Decisions"] += [f"adr/{file.name}" for file in files]
    return config
