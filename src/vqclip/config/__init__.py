"""Configuration: YAML files and ``section.key=value`` overrides to typed sections; size limits; JSON schema.

After `vqclip.io`, which reads the files; before every package that has a section of its own.
"""

from vqclip.config.base import FREE, Config, Modality, json_schema, to_yaml
from vqclip.config.loading import load_config, parse_config
from vqclip.config.messages import did_you_mean

__all__ = [
    "FREE",
    "Config",
    "Modality",
    "did_you_mean",
    "json_schema",
    "load_config",
    "parse_config",
    "to_yaml",
]
