"""The configuration: a typed tree (tree.py), how it is loaded (load.py), what it refuses (values.py, checks.py)."""

from mtrl.config.checks import warnings
from mtrl.config.command_line import take_file
from mtrl.config.config_error import ConfigError
from mtrl.config.load_config import given_keys, load_config, to_dict, to_yaml
from mtrl.config.tree import Config

__all__ = ["Config", "ConfigError", "given_keys", "load_config", "take_file", "to_dict", "to_yaml", "warnings"]
