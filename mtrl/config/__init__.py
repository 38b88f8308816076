"""The configuration: a typed tree (tree.py), its loader (load_config.py), its checks (checks.py)."""

from mtrl.config.checks import find_warnings
from mtrl.config.command_line import take_file
from mtrl.config.config_error import ConfigError
from mtrl.config.load_config import load_config, read_overrides, to_dict, to_yaml
from mtrl.config.tree import Config

__all__ = ["Config", "ConfigError", "find_warnings", "load_config", "read_overrides", "take_file", "to_dict", "to_yaml"]
