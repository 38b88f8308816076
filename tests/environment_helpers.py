"""An environment whose every answer depends on its random numbers and on all that happened to it before."""

from concurrent.futures import wait

from mtrl.environments.records import RolloutKey, ToolCall

WALK = '''
import asyncio, os, random, sys, time
import numpy as np
from PIL import Image

class Walk:
    """Remembers its steps; each depends on those before."""

    def reset(self, word, seed=None, **row):
        self.steps = [word, random.random(), seed]
        return f"{word} {random.random()} {sorted(row)}"

    def step(self, length: int) -> str:
        """Goes on.

        Args:
            length: How far.
        """
        self.steps.append((length, random.random(), float(np.random.rand()), len({*"abcdefg", *self.steps[0]})))
        return f"{self.steps[0]} {len(self.steps)} {hash(tuple(self.steps[1:2])) % 1000} {self.steps[-1]}"

    async def wait_and_step(self, seconds: float) -> str:
        """Waits, in three parts, one of them a task of its own.

        Args:
            seconds: How long.
        """
        first = random.random()
        await asyncio.sleep(seconds)
        async def draw():
            a = random.random()
            await asyncio.sleep(seconds)
            return a, float(np.random.rand())
        drawn = await asyncio.gather(draw(), draw())
        self.steps.append((first, *drawn, random.random()))
        return str(self.steps[-1])

    def picture(self) -> list:
        """Shows noise."""
        self.steps.append(random.random())
        return [{"type": "text", "text": "so"}, {"type": "image", "image": Image.fromarray(
            np.random.randint(0, 256, (5, 4, 3)).astype(np.uint8))}]

    def order(self) -> str:
        """The order of a set of texts."""
        return str(list({f"word {i}" for i in range(50)}))

    def quit(self):
        """Ends its process."""
        self.steps.append("not to be remembered")
        os._exit(4)

    def quit_once(self, note: str) -> str:
        """Ends its process the first time.

        Args:
            note: A file that remembers it.
        """
        if not os.path.exists(note):
            open(note, "w").close()
            os._exit(4)
        return self.step(1)

    def unsteady(self) -> str:
        """Differs from process to process."""
        self.steps.append(os.getpid())
        return str(os.getpid())

    def process(self) -> str:
        """Its number."""
        return str(os.getpid())

    def get_reward(self):
        return len(self.steps) + random.random()
'''


def walk_file(folder):
    path = folder / "walk.py"
    path.write_text(WALK)
    return f"{path}:Walk"


def key(sample=0, task="t"):
    return RolloutKey(seed=1, step=2, task=task, sample=sample)


def begin(pool, keys, **columns):
    """Sessions of these rollouts, and what they say first."""
    sessions = pool.open([{"word": each.task, **columns} for each in keys], keys)
    return sessions, [session.reset().result(timeout=120).text for session in sessions]


def call(session, name, **arguments):
    return session.pool.call([(session, ToolCall(name, arguments))])[0].result(timeout=120)


def call_all(pool, calls):
    """Results of one turn: (session, name, arguments) each."""
    futures = pool.call([(session, ToolCall(name, arguments)) for session, name, arguments in calls])
    assert not wait(futures, timeout=120).not_done
    return [future.result() for future in futures]


def seen(result):
    """All that the model reads of a result."""
    return [block if isinstance(block, str) else block.tolist() for block in result.content], result.error
