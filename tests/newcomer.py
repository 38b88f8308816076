"""A newcomer's hour, timed: build the wheels, install them without pins into an empty environment, follow the tutorial.

    python tests/newcomer.py [--torch 'torch==2.13.0+cpu'] [--out FILE]

Every command of docs/tutorial.md runs as a reader would type it, in an empty folder with the commands of the new
environment: demo, own data, own reward, training, pictures, the viewer (its page is fetched), evaluation, comparison,
export. `--torch` is installed first, as docs/install.md advises machines without a GPU.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_pages import NOT_HERE, SERVER, read_blocks, visit  # noqa: E402

from benchmarks.environment import finish  # noqa: E402

PAGE = "tutorial.md"
EXTRAS = "embedded,view,compare"
COPIED = ("pyproject.toml", "README.md", "LICENSE", "mtrl", "embedded")


class Hour:
    """Runs commands in an empty folder and notes how long each takes."""

    def __init__(self, folder):
        self.folder, self.took = folder, []
        self.bin = folder / "environment" / "bin"
        self.environment = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        self.environment["PATH"] = f"{self.bin}{os.pathsep}{os.environ['PATH']}"

    def run(self, command, server=False):
        begin = time.perf_counter()
        if server:
            visit(str(self.bin / command), self.environment)
        else:
            done = subprocess.run(["bash", "-c", command], env=self.environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        seconds = round(time.perf_counter() - begin, 1)
        self.took.append(
            {"command": command.replace(str(self.folder), ".").replace(sys.executable, "python"), "seconds": seconds}
        )
        print(f"{seconds:7.1f} s  {command}", flush=True)

    def install(self, torch):
        """From a copy of the sources, since a build writes beside them."""
        sources, wheels = self.folder / "sources", self.folder / "wheels"
        sources.mkdir()
        for path in (ROOT / name for name in COPIED):
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
                shutil.copytree(path, sources / path.name, ignore=ignored)
            else:
                shutil.copy(path, sources)
        pip = f"{shlex.quote(sys.executable)} -m pip wheel --quiet --no-deps --wheel-dir {wheels}"
        self.run(f"{pip} {sources} {sources / 'embedded'}")
        self.run(f"{shlex.quote(sys.executable)} -m venv {self.folder / 'environment'}")
        if torch is not None:
            self.run(f"pip install --quiet '{torch}'")
        (wheel,) = wheels.glob("mtrl-*.whl")
        self.run(f"pip install --quiet --find-links {wheels} '{wheel}[{EXTRAS}]'")

    def follow(self):
        os.chdir(self.folder)
        for block in read_blocks(PAGE):
            if block.file:
                Path(block.file).write_text(block.text)
            if block.language == "bash" and block.mark not in NOT_HERE:
                for command in block.text.strip().splitlines():
                    self.run(command, server=block.mark == SERVER)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=None, help="a requirement that is installed first")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    out = options.out and options.out.resolve()
    with tempfile.TemporaryDirectory(prefix="mtrl-newcomer-") as folder:
        hour = Hour(Path(folder))
        hour.install(options.torch)
        hour.follow()
        wheels = {path.name.split("-")[0]: path.stat().st_size for path in hour.folder.glob("wheels/*.whl")}
        frozen = subprocess.run([hour.bin / "pip", "freeze"], capture_output=True, text=True, check=True).stdout
        os.chdir(ROOT)
    names = ("torch", "transformers", "pyarrow", "numpy")
    installed = [line for line in frozen.splitlines() if line.partition("==")[0] in names]
    minutes = round(sum(each["seconds"] for each in hour.took) / 60, 1)
    result = {"bench": "newcomer", "minutes": minutes, "wheel_bytes": wheels, "installed": installed}
    finish(result | {"commands": hour.took}, out)


if __name__ == "__main__":
    main()
