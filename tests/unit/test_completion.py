"""`mtrl completion`: what a word can become, and that real shells complete it."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time

import pytest
from sources import ROOT

from mtrl.cli import main
from mtrl.commands.completion import SCRIPTS, candidates
from mtrl.commands.help_pages import COMMANDS, module_name
from mtrl.config.tree import known_leaves

SECTIONS = ("dataset.", "training.", "optimization.", "worker.")
LR = "worker.actor.optim.lr"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with files, in which `mtrl` is the command of this environment."""
    for name in ("runs/one/config.yaml", "run.yaml", "own run.yaml", ".hidden"):
        (tmp_path / "work" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "work" / name).touch()
    program = tmp_path / "bin" / "mtrl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mtrl "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path / "work")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("mtrl ", list(COMMANDS)),
        ("mtrl co", ["compare", "config", "convert", "completion"]),
        ("mtrl -", ["--help", "--version"]),
        ("mtrl train ", [*SECTIONS, "mtrl:", "own run.yaml", "run.yaml", "runs/"]),
        ("mtrl train ru", ["run.yaml", "runs/"]),
        ("mtrl train .h", [".hidden"]),
        ("mtrl view runs/", ["runs/one/"]),
        ("mtrl train run.yaml worker.act", ["worker.actor."]),
        ("mtrl train run.yaml worker.actor.optim.l", [f"{LR}=", f"{LR}_scheduler_type="]),
        ("mtrl train run.yaml --worker.rew", ["--worker.reward."]),
        ("mtrl train worker.rollout.name=", [f"worker.rollout.name={name}" for name in ("auto", "local", "vllm")]),
        ("mtrl train training.fresh=", ["training.fresh=true", "training.fresh=false"]),
        ("mtrl train dataset.train_files=run", ["dataset.train_files=run.yaml", "dataset.train_files=runs/"]),
        ("mtrl train mtrl:zoo/d", ["mtrl:zoo/dapo", "mtrl:zoo/dr_grpo"]),
        ("mtrl train no.such_key=", ["no.such_key=own run.yaml", "no.such_key=run.yaml", "no.such_key=runs/"]),
        ("mtrl config ex", ["explain"]),
        ("mtrl config explain worker.actor.optim.lr", [LR, f"{LR}_scheduler_type"]),
        ("mtrl export runs/one --d", ["--dtype"]),
        ("mtrl export runs/one --dtype ", ["bf16", "fp32"]),
        ("mtrl export runs/one --to r", ["run.yaml", "runs/"]),
        ("mtrl prepare m", ["mmmu-pro", "merge"]),
        ("mtrl completion f", ["fish"]),
        ("mtrl nothing of this", []),
    ],
)  # fmt: skip
def test_what_a_word_can_become(line, found, folder):
    assert candidates(line) == found


def test_every_key_is_reached_part_by_part():
    def reached(word: str) -> list[str]:
        return [
            key for each in candidates(f"mtrl train {word}") for key in ([each] if each[-1] == "=" else reached(each))
        ]

    assert [key for section in SECTIONS for key in reached(section)] == [f"{key}=" for key in known_leaves()]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_that_a_command_reads_is_offered(command):
    source = (ROOT / "mtrl" / "commands" / f"{module_name(command)}.py").read_text()
    read = set(re.findall(r'"(--[a-z][a-z-]*)"', source)) - {"--help", "--version", "--line"}
    assert read <= set(candidates(f"mtrl {command} --"))


def test_no_candidate_needs_torch():
    code = "from mtrl.cli import main; import sys; main(['completion', '--line', 'mtrl train worker.act']); "
    code += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "worker.actor.\n")


@pytest.mark.parametrize("words", [[], ["tcsh"], ["bash", "zsh"], ["--line"]])
def test_another_shell(words, capsys):
    assert main(["completion", *words]) == 2
    assert capsys.readouterr().err == "mtrl: which shell? mtrl completion bash|zsh|fish\n"


@pytest.mark.parametrize(
    ("line", "after_break", "reply"),
    [
        ("mtrl train run.yaml worker.act", "worker.act", ["worker.actor."]),
        ("mtrl train worker.rollout.name=v", "v", ["vllm"]),  # bash breaks words at = and :
        ("mtrl train mtrl:zoo/dr", "zoo/dr", ["zoo/dr_grpo"]),
        ("mtrl train ow", "ow", [r"own\ run.yaml"]),
    ],
)
def test_the_function_of_bash(line, after_break, reply, folder):
    script = f"""{SCRIPTS["bash"]}
    COMP_LINE='{line}' COMP_POINT={len(line)}
    _mtrl mtrl '{after_break}' ''
    printf '%s\\n' "${{COMPREPLY[@]}}"
    complete -p mtrl"""
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines() == [*reply, "complete -o default -F _mtrl mtrl"] and not done.stderr


SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "--no-rcs", "-i"],
    "fish": ["fish", "--no-config", "--interactive"],
}
START = {
    "bash": 'eval "$(mtrl completion bash)"',
    "zsh": 'autoload -U compinit; compinit -u -D; eval "$(mtrl completion zsh)"',
    "fish": "mtrl completion fish | source",
}
TYPED = {
    "mtrl train run.yaml worker.act": "mtrl train run.yaml worker.actor.",
    "mtrl train worker.rollout.name=vl": "mtrl train worker.rollout.name=vllm",
    "mtrl train mtrl:zoo/dr": "mtrl train mtrl:zoo/dr_grpo",
    "mtrl export x --dty": "mtrl export x --dtype",
    "mtrl train ow": "mtrl train own run.yaml",
}
TAB, LINE_START = "\t", "\x01"


@pytest.mark.slow  # 20 seconds
@pytest.mark.parametrize("shell", SHELLS)
def test_the_tab_key_in_a_real_shell(shell, folder):
    """Types a line and TAB into a terminal, then `echo` before the line: the shell prints what it completed."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} (apt-get install {shell})")
    process, terminal = pty.fork()
    if process == 0:
        os.execvpe(shell, SHELLS[shell], os.environ | {"TERM": "dumb", "HOME": os.getcwd()})
    try:
        send(terminal, f"{START[shell]}; echo ready\n")
        wait_for(terminal, "ready")
        for typed, completed in TYPED.items():
            send(terminal, f"{typed}{TAB}{LINE_START}echo \n")
            wait_for(terminal, completed)
    finally:
        os.close(terminal)
        os.waitpid(process, 0)


def send(terminal: int, text: str) -> None:
    os.write(terminal, text.encode())


def wait_for(terminal: int, line: str, limit: float = 120) -> None:
    """Read until the shell prints the line; only a failure reaches the limit."""
    shown, end = "", time.monotonic() + limit
    while not re.search(rf"(?m)^{re.escape(line)}\s*$", shown):
        assert time.monotonic() < end, f"no line {line!r} in {shown!r}"
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
