"""Configuration: YAML files and ``section.key=value`` overrides to typed sections; limits of sizes; JSON schema.

After `vqclip.io`, which reads the files; before everything that has a section of its own.
"""

from vqclip.config.base import Config, did_you_mean, json_schema, load_config, suggest_keys, to_yaml

__all__ = ["Config", "did_you_mean", "json_schema", "load_config", "suggest_keys", "to_yaml"]
