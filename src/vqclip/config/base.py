"""Base class of all sections of a configuration, and what can be made of a whole tree.

A section is a subclass of `Config` in the module of the class that it builds. A choice between sections is a union
whose members have a literal ``kind``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, PydanticSerializationError, to_jsonable_python

from vqclip.config.yaml import dump_yaml

Modality = Literal["image", "text"]
"""Kind of input of a tower or tokenizer."""
INT64 = {"ge": -(2**63), "le": 2**63 - 1}
"""Range of an integer whose field sets no bound of its own: that of torch's and numpy's int64."""

FREE = "a resumed run may change it"
"""Mark of a field, as in ``Annotated[int, FREE]``: it does not define the trajectory of a run. Other fields do."""


def _make_scalars_strict(schema: Any) -> None:
    if isinstance(schema, (list, tuple)):
        for item in schema:
            _make_scalars_strict(item)
    elif isinstance(schema, dict):
        if schema.get("type") in ("int", "float", "str", "bool"):
            schema["strict"] = True
        if schema.get("type") == "int":
            lower = {} if "gt" in schema else {"ge": INT64["ge"]}
            upper = {} if "lt" in schema else {"le": INT64["le"]}
            schema.update(lower | upper | schema)
        for key, item in schema.items():
            if key not in ("default", "metadata", "expected"):
                _make_scalars_strict(item)


class Config(BaseModel):
    """Base of every section of the configuration.

    Unknown keys, NaN and infinity are refused; instances are frozen; a docstring under a field documents it. Scalars
    are strict: ``"3"`` and ``true`` are not integers, but an integer is a number. Lists become tuples and strings
    become paths.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler, /) -> CoreSchema:
        # pydantic's own `strict` would also refuse lists for tuples, strings for paths and dicts for sections.
        schema = handler(source)
        _make_scalars_strict(handler.resolve_ref_schema(schema))
        return schema

    def trajectory(self) -> dict[str, Any]:
        """Return the settings that define the trajectory of a run, as plain data: all but those marked `FREE`."""
        return self.model_dump(mode="json", exclude=self._free())

    def _free(self) -> dict[str, Any]:
        """Return the fields that are marked, and those of sections in fields."""
        fields = type(self).model_fields.items()
        found: dict[str, Any] = {name: True for name, field in fields if FREE in field.metadata}
        for name, value in self:
            if name not in found and isinstance(value, Config) and (inner := value._free()):
                found[name] = inner
        return found

    def model_dump_json(self, **options: Any) -> str:
        """Return the section as JSON, in ASCII if it contains paths that are not UTF-8, which pydantic refuses."""
        try:
            return super().model_dump_json(**options)
        except PydanticSerializationError:
            return json.dumps(self.model_dump(mode="json", **options))


def to_yaml(config: Config, change: Callable[[Any], Any] | None = None) -> str:
    """Return the whole tree, defaults included, as YAML; `load_config` reads it back to an equal tree.

    Args:
        config: the tree.
        change: applied to the tree as plain data before it is written; it may mask credentials, for example.
    """
    # In two steps: pydantic 2.10's JSON mode writes the list of a `Path | tuple[Path, ...]` as one string.
    plain = to_jsonable_python(config.model_dump())
    return dump_yaml(plain if change is None else change(plain))


def json_schema(schema: Any) -> dict[str, Any]:
    """Return a JSON schema of a configuration, or a union of several, for editors that check and complete YAML."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **TypeAdapter(schema).json_schema()}
