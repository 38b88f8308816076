"""The command `mtrl`. The module of a command is imported when it runs, since most load torch."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import FrameType

from mtrl.commands import help_pages
from mtrl.utils.package_version import package_version

Command = Callable[[Sequence[str]], int]

USER_ERROR = 2
STOPPED = 130  # exit status that shells report after Ctrl-C
BROKEN_PIPE = 141  # exit status that shells report after SIGPIPE: nobody reads the output
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # how torch's threads (libgomp) wait; a user may have set either
SPINS = "1000"  # libgomp's own number for more threads than processors


def run_command(name: str, arguments: Sequence[str]) -> int:
    if name == "doctor" and not {"--try", "--parity"} & set(arguments):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
    status: int = import_module(f"mtrl.commands.{help_pages.module_name(name)}").run(arguments)
    return status


COMMANDS: dict[str, Command] = {name: partial(run_command, name) for name in help_pages.COMMANDS}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 if the command failed; 2 if the user has to change something first."""
    _let_threads_sleep()
    handler = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    replaced = handler is signal.default_int_handler and in_main_thread  # only there may it be replaced
    if replaced:
        signal.signal(signal.SIGINT, _exit_while_starting)
    try:
        from mtrl.utils.terminal import sanitized_streams

        with sanitized_streams():
            return _main(list(sys.argv[1:] if argv is None else argv))
    finally:
        if replaced:
            signal.signal(signal.SIGINT, handler)


def _let_threads_sleep() -> None:
    """A thread of torch spins 300,000 times before it sleeps. If another program computes, it spins away the time that
    the thread it waits for needs, and steps take many times as long (`benchmarks.busy_processors`). libgomp reads this
    when torch is imported, which has not happened yet."""
    if not any(name in os.environ for name in WAITING):
        os.environ[WAITING[0]] = SPINS


def _main(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if name in ("-V", "--version"):
        print(f"mtrl {package_version()}")
        return 0
    if name not in COMMANDS:
        print(f"mtrl: no command {name!r}{_suggestion(name)}", file=sys.stderr)
        return USER_ERROR
    if undecodable := [argument for argument in arguments if not _is_utf8(argument)]:
        message = "is not UTF-8 text, which the files of a run need; use another name"
        print(f"mtrl: {undecodable[0]} {message}", file=sys.stderr)
        return USER_ERROR
    return _run(name, arguments[1:])


def _exit_while_starting(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: exit at once before a command runs, since an interrupted import may raise any error."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("mtrl.commands.") and frame.f_code.co_name != "<module>":
            raise KeyboardInterrupt
        frame = frame.f_back
    os.write(2, b"mtrl: stopped\n")
    os._exit(STOPPED)


def _is_utf8(argument: str) -> bool:
    """Python reads the bytes of an argument that are not UTF-8 as surrogates, which cannot be written."""
    return not any("\ud800" <= character <= "\udfff" for character in argument)


def _suggestion(name: str) -> str:
    from difflib import get_close_matches

    if name.endswith((".yaml", ".yml")):
        return f"; did you mean mtrl train {name}?"
    near = get_close_matches(name, COMMANDS, n=1)
    return f"; did you mean mtrl {near[0]}?" if near else f"\n\n{_overview()}"


def _run(name: str, arguments: Sequence[str]) -> int:
    if name == "config" and len(arguments) > 1 and arguments[0] in ("-h", "--help"):
        arguments = ["explain", *arguments[1:]]
    elif "-h" in arguments or "--help" in arguments:
        print(help_pages.help_page(name))
        return 0
    import logging

    from mtrl.config import ConfigError
    from mtrl.utils.errors import Finished, RunError, StartError

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("huggingface_hub").propagate = False  # it has its own handler
    try:
        status = COMMANDS[name](arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _is_stdout_broken():
            raise
        return BROKEN_PIPE
    except (ConfigError, StartError) as error:
        print(f"mtrl: {error}", file=sys.stderr)
        return USER_ERROR
    except Finished as finished:
        print(f"mtrl: {finished}", file=sys.stderr)
        return 0
    except RunError as error:
        print(f"mtrl: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mtrl: stopped", file=sys.stderr)
        return STOPPED
    except OSError as error:
        if error.filename != "<stdout>":
            raise
        print(f"mtrl: stdout cannot be written: {error.strerror}", file=sys.stderr)
        _discard_stdout()
        return 1


def _is_stdout_broken() -> bool:
    """Whether nobody reads stdout any more, as after `| head`; if so, the rest of it is discarded."""
    try:
        print(flush=True)
    except BrokenPipeError:
        _discard_stdout()
        return True
    return False


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _overview() -> str:
    lines = [f"  {name:<10} {help_pages.help_page(name).splitlines()[0]}" for name in COMMANDS]
    return "\n".join(["usage: mtrl COMMAND ...  (mtrl COMMAND --help says more)", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
