"""Complete commands, options, keys, values and files in your shell.

mtrl completion bash|zsh|fish

Prints the script for a shell. Put it where the shell reads it at its start:
  bash   echo 'eval "$(mtrl completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(mtrl completion zsh)"' >> ~/.zshrc      (after compinit)
  fish   mtrl completion fish > ~/.config/fish/completions/mtrl.fish
Then mtrl train run.yaml worker.act<TAB> completes the key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from mtrl.commands.help_pages import COMMANDS, help_page
from mtrl.config.packaged import PREFIX, packaged_configs
from mtrl.config.tree import known_leaves
from mtrl.utils.errors import StartError

# A script asks `mtrl completion --line LINE` for the candidates of the last word of LINE. No space follows a candidate
# that can go on: a section, a key, a folder. bash replaces only what follows the last = or : of the word.
SCRIPTS = {
    "bash": r"""_mtrl() {
    local line=${COMP_LINE:0:COMP_POINT}
    local word=${line##*[[:space:]]}
    mapfile -t COMPREPLY < <("$1" completion --line "$line" 2> /dev/null)
    COMPREPLY=("${COMPREPLY[@]#"${word%"$2"}"}")
    COMPREPLY=("${COMPREPLY[@]// /\\ }")
    if [[ ${COMPREPLY[0]} == *[./=:] ]]; then compopt -o nospace 2> /dev/null; fi
}
complete -o default -F _mtrl mtrl
""",
    "zsh": r"""#compdef mtrl
_mtrl() {
    local -a found
    found=(${(f)"$($words[1] completion --line "${(j: :)words[1,CURRENT-1]} $PREFIX" 2> /dev/null)"})
    (( $#found )) || { _files; return }
    compadd -S '' -- ${(M)found:#*[./=:]}
    compadd -- ${found:#*[./=:]}
}
compdef _mtrl mtrl
""",
    "fish": r"""function __mtrl_candidates
    set -l words (commandline --current-process --tokenize --cut-at-cursor)
    $words[1] completion --line (commandline --current-process --cut-at-cursor | string collect) 2> /dev/null
end
complete --command mtrl --no-files --arguments '(__mtrl_candidates)'
""",
}


def run(arguments: Sequence[str]) -> int:
    if len(arguments) == 2 and arguments[0] == "--line":
        print("\n".join(candidates(arguments[1])))
        return 0
    if len(arguments) != 1 or arguments[0] not in SCRIPTS:
        raise StartError(f"which shell? mtrl completion {'|'.join(SCRIPTS)}")
    print(SCRIPTS[arguments[0]], end="")
    return 0


def candidates(line: str) -> list[str]:
    """What the last word of a command line can become; the first word is the program."""
    *before, word = f"{line}|".split()  # the mark makes an empty last word of a space at the end
    word = word.removesuffix("|")
    if len(before) < 2:
        return matching(word, ("--help", "--version") if word.startswith("-") else COMMANDS)
    command = before[1]
    return list(dict.fromkeys(_arguments(command, before[2:], word))) if command in COMMANDS else list_files(word)


def matching(word: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(word)]


def _arguments(command: str, before: Sequence[str], word: str) -> Iterator[str]:
    usage = help_page(command).split("\n\n")[1]
    options: dict[str, str] = dict(re.findall(r"(--[a-z-]+)(?: ([^\s\[\]]+))?", usage))
    takes_keys = "a.b=c" in usage
    if before and options.get(before[-1]):  # the word is the value of an option
        choices = options[before[-1]].split("|")
        yield from matching(word, choices) if len(choices) > 1 else list_files(word)
    elif (command, *before) == ("config", "explain"):
        yield from (key.removesuffix("=") for key in complete_key(word))
    elif takes_keys and "=" in word:
        key, _, value = word.partition("=")
        leaf = known_leaves().get(key.removeprefix("--"))
        found = matching(value, allowed_values(leaf.annotation, leaf.names)) if leaf else []
        yield from (f"{key}={each}" for each in found or list_files(value))
    else:
        dashes = "--" if word.startswith("--") else ""
        yield from matching(word, options if dashes else ())
        if not before:  # words of the usage in small letters: `mtrl prepare aokvqa|arxivqa`
            names = re.findall(rf"(?m)^mtrl {command} ([a-z][\w|-]*)", usage)
            yield from matching(word, "|".join(names).split("|") if names else ())
        if takes_keys:
            yield from (dashes + key for key in complete_key(word.removeprefix("--")))
            yield from complete_packaged(word)
        yield from list_files(word)


def complete_key(word: str) -> Iterator[str]:
    """The keys that start with the word, up to their next dot: `worker.act` becomes `worker.actor.`."""
    for key in matching(word, known_leaves()):
        end = key.find(".", len(word))
        yield f"{key}=" if end < 0 else key[: end + 1]


def allowed_values(annotation: Any, names: Sequence[str]) -> Iterator[str]:
    """The values of a key that can be listed: `true`, `null`, names."""
    yield from names
    if annotation is bool:
        yield from ("true", "false")
    elif annotation is type(None):
        yield "null"
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) is not tuple:  # the members of a union
        for member in get_args(annotation):
            yield from allowed_values(member, ())


def complete_packaged(word: str) -> list[str]:
    """Packaged configurations, once the word asks for them."""
    names = (name.removeprefix("experiments/").removesuffix(".yaml") for name in packaged_configs())
    return matching(word, (PREFIX + name for name in names) if word.startswith(PREFIX) else (PREFIX,))


def list_files(word: str) -> list[str]:
    """Files and folders whose path starts with the word, hidden ones if the word says so."""
    folder, name = os.path.split(word)
    try:
        entries = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda entry: entry.name)
    except OSError:
        return []
    return [
        os.path.join(folder, entry.name) + ("/" if entry.is_dir() else "")
        for entry in entries
        if entry.name.startswith(name) and (name or not entry.name.startswith("."))
    ]
