"""The names of the commands, and their help pages: the docstrings of the modules, which are read from the source, since
importing a module would load torch, and help and completion have to be quick."""

import os

COMMANDS = (
    "train", "demo", "eval", "data", "prepare", "reward", "attention", "tools", "plot", "compare", "view", "report",
    "export", "doctor", "bench", "replay", "config", "convert", "completion",
)  # fmt: skip
MODULES = {"eval": "evaluate"}  # commands whose module has another name


def module_name(command: str) -> str:
    return MODULES.get(command, command)


def help_page(command: str) -> str:
    module = os.path.join(os.path.dirname(__file__), f"{module_name(command)}.py")
    with open(module, encoding="utf-8") as file:
        return file.read().split('"""')[1].strip()
