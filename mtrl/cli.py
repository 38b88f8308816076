"""The command `mtrl`. A command is a function of its arguments and imports what it needs itself: help is quick."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

Command = Callable[[Sequence[str]], int]

USER_ERROR = 2
STOPPED = 130  # exit status that shells report after Ctrl-C
UNREAD = 141  # exit status that shells report where nobody reads the output (SIGPIPE)


def reward(arguments: Sequence[str]) -> int:
    """Try a reward function on recorded responses, without a model.

    mtrl reward FILE --data ROLLOUTS|DATASET [a.b=c ...]

    FILE is file.py[:name], package.module:name or a built-in. ROLLOUTS is the rollouts.jsonl of a run, or the run; a
    DATASET is tried with its column `response`, else with its answers. Shows every part, a histogram, the slowest and
    the failed responses; worker.reward.reward_fn_kwargs, timeout_s and num_cpus hold here too. The last line is JSON.
    Exit status 1: it failed on every response.
    """
    from mtrl.commands import reward

    return reward.run(arguments)


def config(arguments: Sequence[str]) -> int:
    """Print the resolved configuration, or explain a key.

    mtrl config [FILE] [a.b=c ...]
    mtrl config explain [KEY]
    mtrl config --list

    FILE is YAML over the defaults, your own or one of the package, which --list names. Overrides are a.b=c, --a.b=c or
    --a.b c, with values in YAML: null, true, [x, y].
    explain (or --help KEY) says what a key means and takes, whether a resumed run may change it, and its names in
    EasyR1, verl and TRL; of a section (worker.reward) each key in a line, and without a KEY all of them.
    """
    from mtrl.commands import config

    return config.run(arguments)


def train(arguments: Sequence[str]) -> int:
    """Train a model.

    mtrl train [FILE] [a.b=c ...]

    FILE is YAML, your own or one of the package: mtrl:zoo/tprl_full. mtrl config --list names them.
    With no file, no model and no data: the embedded model on the embedded task, in sizes for a laptop.
    """
    from mtrl.commands import train

    return train.run(arguments)


def evaluate(arguments: Sequence[str]) -> int:
    """Accuracy and rewards of a checkpoint or of a run's newest one: avg@k, pass@k, by column.

    mtrl eval CHECKPOINT|RUN [--data FILE] [--out FILE] [a.b=c ...]

    worker.rollout.val.n and .temperature say how it is sampled. --out keeps every question, answer and response with
    its scores, as JSONL. optimization.compute_attention_metrics=true measures attention too, which takes longer. The
    last line is JSON.
    """
    from mtrl.commands import evaluate

    return evaluate.run(arguments)


def demo(arguments: Sequence[str]) -> int:
    """Watch the embedded model learn, in minutes on a laptop.

    mtrl demo [a.b=c ...]

    Ends with accuracy before and after by kind of question, a learning curve, and a last line of JSON.
    """
    from mtrl.commands import demo

    return demo.run(arguments)


def data(arguments: Sequence[str]) -> int:
    """Look at a dataset as the model will see it.

    mtrl data FILE|RUN.yaml [a.b=c ...]

    Counts, lengths, image sizes, columns, bad rows, three samples, and how many prompts the length limit drops. FILE is
    a file, a directory, a hub id[@split] or zoo@train; token counts need worker.actor.model.model_path=MODEL. Of a
    configuration: its data, through its template and its model's tokenizer, and what its rewards miss in them.
    """
    from mtrl.commands import data

    return data.run(arguments)


def prepare(arguments: Sequence[str]) -> int:
    """Make a public dataset ready for training: one schema, Parquet shards, a card, a sheet of samples.

    mtrl prepare aokvqa|arxivqa|mmmu-pro [SOURCE] [--out DIR] [--split S] [--subset N] [--seed N] [--ids FILE]
                 [--images embed|paths] [--image-dir DIR] [--options 4,10,vision] [--shard-mib N] [--skip-bad]
    mtrl prepare merge [DIR[@split] ...] [--val 0.1] [--out DIR] [--subset N] [--seed N] [--images embed|paths] ...

    SOURCE is a hub id or a local copy: Parquet, Arrow or JSON with images; without it the dataset's own id. --subset
    counts questions, --ids names them. --options is MMMU-Pro's. merge joins prepared folders (without any: the three
    above) and holds a share of the questions back, never of the rows, for validation: data/ddm, which the experiments
    read. An image that is missing or damaged ends it, unless --skip-bad. The same command goes on where it was
    interrupted, to the same bytes. The last line is JSON.
    """
    from mtrl.commands import prepare

    return prepare.run(arguments)


def doctor(arguments: Sequence[str]) -> int:
    """Look at this machine, and whether a configuration can run on it.

    mtrl doctor [FILE] [--gpu GIB | --try] [a.b=c ...]

    Versions, devices, memory, optional features and what they lack; then missing files, disk and a memory estimate of
    the run, and what to change where it does not fit: here, or on one GPU of that size. Some rows of the data that are
    here are tried, through template and tokenizer. No weights are loaded, nothing is downloaded. Exit status 2: it
    cannot run.
    --try loads the weights, compares log-probs with transformers' own forward and does one whole step at the configured
    sizes, with its times and peak memory, in a temporary directory.
    """
    if "--try" not in arguments:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
    from mtrl.commands import doctor

    return doctor.run(arguments)


def attention(arguments: Sequence[str]) -> int:
    """See where a checkpoint, or a run's newest one, looks while it answers.

    mtrl attention CHECKPOINT|RUN [--data FILE] [--samples 8] [--tokens orange,B,-1] [--out DIR] [a.b=c ...]

    A report in Markdown: VGR and AEI by layer segment, the tokens that look most and least, and pictures of the
    attention over the image. --tokens chooses what is drawn, by word or by place (-1 is the last); otherwise the
    extremes and the answer's letter. The last line is JSON.
    """
    from mtrl.commands import attention

    return attention.run(arguments)


def convert(arguments: Sequence[str]) -> int:
    """Turn a configuration of EasyR1, verl or TRL into one of MTRL.

    mtrl convert FILE.yaml|FILE.py [--gpus N] > run.yaml

    YAML of EasyR1, verl (hydra) and TRL, or a Python file with GRPOConfig(..) and GRPOTrainer(..), which is read and
    never run. On stderr a line for each key: maps, another meaning, no counterpart; and their defaults that differ.
    TRL's batch sizes are per process: --gpus says how many there are. Exit status 0: everything maps; 1: something does
    not, though the YAML is written and loads; 2: the file cannot be read.
    """
    from mtrl.commands import convert

    return convert.run(arguments)


def plot(arguments: Sequence[str]) -> int:
    """Draw the curves of a run, or of several in one picture.

    mtrl plot RUN... [--out FILE] [metric ...]

    Reward and accuracy, of training and at each validation, or the metrics that are named: any that metrics.jsonl has,
    such as actor/entropy or val/avg@1. FILE ends in .png, .svg or .pdf; without it one run has its curve.png drawn
    anew, and other pictures are plot.png in the working directory. Prints the path of the picture.
    """
    from mtrl.commands import plot

    return plot.run(arguments)


def compare(arguments: Sequence[str]) -> int:
    """Compare configurations over the same seeds, or runs that are there, with intervals and tests.

    mtrl compare CONFIG CONFIG... [--seeds 5 | 5-9] [--jobs 1] [--minutes M] [--out DIR] [--archive FILE] [a.b=c ...]
    mtrl compare RUN|DIR_OF_RUNS RUN|DIR_OF_RUNS... [--out DIR]

    Trains every configuration with each seed, --jobs at once, into DIR/CONFIG/seed_S; the first is what the others are
    compared with. The same command goes on where it was interrupted; --minutes ends it in time, and --archive packs DIR
    into one file, from which another machine goes on. Writes comparison.md, .json and .png: final accuracy and area
    under the curve with intervals, paired tests with Holm's correction, questions won and lost, the time of a step.
    Exit status 1: a run failed. Needs pip install 'mtrl[compare]'.
    """
    from mtrl.commands import compare

    return compare.run(arguments)


def view(arguments: Sequence[str]) -> int:
    """See runs in the browser: curves, and every recorded response token by token.

    mtrl view RUN_DIR [RUN_DIR ...] [--port N] [--host ADDRESS] [--no-browser]

    Follows a run that goes on, opens one that has ended, compares several: which tokens looked at the image, which were
    trained on, what each response was worth. Also opens TRL's completions (parquet) and verl's rollouts (JSONL). It
    listens on this machine alone unless --host says otherwise. Needs pip install 'mtrl[view]'.
    """
    from mtrl.commands import view

    return view.run(arguments)


def report(arguments: Sequence[str]) -> int:
    """Put a run, or several, into one HTML file to hand on.

    mtrl report RUN_DIR [RUN_DIR ...] [--out DIR] [--rollouts 64]

    report.html is what mtrl view shows, in a file that needs no server and asks nobody: curves, and responses of the
    first step to the last with their images and heat maps. Beside it report.md and curves.png, for a paper. DIR is
    RUN_DIR/report unless it is given. Prints the paths of the files.
    """
    from mtrl.commands import report

    return report.run(arguments)


def export(arguments: Sequence[str]) -> int:
    """Write a run's newest checkpoint, or any, as a model that other tools load, with a card.

    mtrl export RUN|CHECKPOINT --to DIR [--dtype bf16|fp32] [--push ORG/NAME]

    Safetensors with tokenizer, processor and generation settings, adapters merged, and a model card (README.md): the
    run's configuration, curves, data, rewards and samples. --dtype is what the run computed in unless it is given. DIR
    is new or empty. --push uploads it to the Hugging Face hub; a repository that is not there yet is made private. The
    last line is JSON.
    """
    from mtrl.commands import export

    return export.run(arguments)


COMMANDS: dict[str, Command] = {
    "train": train,
    "demo": demo,
    "eval": evaluate,
    "data": data,
    "prepare": prepare,
    "reward": reward,
    "attention": attention,
    "plot": plot,
    "compare": compare,
    "view": view,
    "report": report,
    "export": export,
    "doctor": doctor,
    "config": config,
    "convert": convert,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where it was done in vain; 2 where the user has to change something first."""
    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler and _in_main_thread()
    if ours:
        signal.signal(signal.SIGINT, _leave_while_starting)
    try:
        from mtrl.utils.terminal import doors

        with doors():
            return _main(list(sys.argv[1:] if argv is None else argv))
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def _main(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if name in ("-V", "--version"):
        from importlib.metadata import version

        print(f"mtrl {version('mtrl')}")
        return 0
    if name not in COMMANDS:
        print(f"mtrl: no command {name!r}{_meant(name)}", file=sys.stderr)
        return USER_ERROR
    if strange := [word for word in arguments if not _is_utf8(word)]:
        told = "is not UTF-8 text, and runs write such names down in files that are; give it another name"
        print(f"mtrl: {strange[0]} {told}", file=sys.stderr)
        return USER_ERROR
    return _run(COMMANDS[name], arguments[1:])


def _leave_while_starting(number: int, frame: FrameType | None) -> None:
    """Ctrl-C. Before a command runs nothing is held, and an import that is cut off may raise anything: so leave."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("mtrl.commands.") and frame.f_code.co_name != "<module>":
            raise KeyboardInterrupt
        frame = frame.f_back
    os.write(2, b"mtrl: stopped\n")
    os._exit(STOPPED)


def _in_main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()


def _is_utf8(word: str) -> bool:
    """Python reads bytes of an argument that are no UTF-8 as surrogates, which nothing can write."""
    return not any("\ud800" <= sign <= "\udfff" for sign in word)


def _meant(name: str) -> str:
    from difflib import get_close_matches

    if name.endswith((".yaml", ".yml")):
        return f"; did you mean mtrl train {name}?"
    near = get_close_matches(name, COMMANDS, n=1)
    return f"; did you mean mtrl {near[0]}?" if near else f"\n\n{_overview()}"


def _run(command: Command, arguments: Sequence[str]) -> int:
    import logging

    from mtrl.config import ConfigError
    from mtrl.utils.errors import Finished, RunError, StartError

    if command is config and len(arguments) > 1 and arguments[0] in ("-h", "--help"):
        arguments = ["explain", *arguments[1:]]
    elif "-h" in arguments or "--help" in arguments:
        print("\n".join(line.strip() for line in _doc_lines(command)))
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own, and would say all twice
    try:
        status = command(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return UNREAD
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
        _drop_stdout()
        return 1


def _nobody_reads() -> bool:
    """Whether stdout leads nowhere any more, as after `| head`. Then what is left for it is dropped in silence."""
    try:
        print(flush=True)
    except BrokenPipeError:
        _drop_stdout()
        return True
    return False


def _drop_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _overview() -> str:
    lines = [f"  {name:<9} {_doc_lines(command)[0]}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: mtrl COMMAND ...  (mtrl COMMAND --help says more)", "", *lines])


def _doc_lines(command: Command) -> list[str]:
    return (command.__doc__ or "").strip().splitlines()


if __name__ == "__main__":
    sys.exit(main())
