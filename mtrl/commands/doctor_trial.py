"""`mtrl doctor --try`: first contact with real weights, before a long run. They load, our log-probs are those of
transformers' own forward, and one whole step goes through at the configured sizes. What it writes is thrown away."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from mtrl.commands.load_arguments import started
from mtrl.compose.policy import build_encoder, load_plain, model_path
from mtrl.compose.run import Run, build
from mtrl.config import Config, ConfigError
from mtrl.models.load_model import DTYPES
from mtrl.models.parity import Gap, log_prob_gap
from mtrl.tracking.pace import as_clock
from mtrl.types import Needs
from mtrl.utils.errors import RunError, StartError

ROWS, TOKENS = 2, 32  # of the responses whose log-probs are compared


def trial_problems(config: Config) -> Iterator[str]:
    """Builds the run as training does, and tries it: prints what it finds, and gives what is wrong."""
    print("\nThe trial, in a directory of its own")
    try:
        with tempfile.TemporaryDirectory(prefix="mtrl-try-", ignore_cleanup_errors=True) as folder:
            run = started(build, elsewhere(config, folder))
            with run.closing:
                yield from parity_problems(config, run)
                run.preflight()
                yield from step_problems(run)
    except (ConfigError, StartError, RunError) as error:
        yield str(error)
    except torch.OutOfMemoryError as error:
        yield f"memory: it does not fit into the device: {str(error).splitlines()[0]}"


def elsewhere(config: Config, folder: str) -> Config:
    """The same run, with everything that it writes under `folder`, and quiet."""
    training = replace(
        config.training,
        output_dir=folder,
        logger=(),
        fresh=False,
        val_only=False,
        rollout_log_path=None,
        attention_diag_log_path=None,
    )
    return replace(config, training=training)


def parity_problems(config: Config, run: Run) -> Iterator[str]:
    """Sampled responses to two prompts, by the run's actor and by the checkpoint as transformers loads it."""
    loop, algorithm_spec = run.loop, run.loop.algorithm_spec
    place = str(run.start.checkpoint or model_path(config))
    tokens = min(TOKENS, algorithm_spec.sampling.max_new_tokens)
    sampling = replace(algorithm_spec.sampling, n=1, max_new_tokens=tokens, step=loop.done, version=loop.version)
    with loop.components.generator.resident():
        rollouts = loop.components.generator.generate(loop.components.source.take(ROWS), sampling)
    ours = loop.components.actor.probe(rollouts, Needs("old_logprobs"), loop.done).old_logprobs
    assert ours is not None, "it was asked for"
    model = load_plain(config, place)
    said = f"{sum(p.numel() for p in model.parameters()) / 1e6:,.1f} million parameters on {model.device.type}"
    print(f"  loaded     {place}: {said}")
    temperature, dtype = config.worker.rollout.temperature, config.worker.actor.fsdp.mixed_precision_dtype
    encoder = build_encoder(config)
    gap = log_prob_gap(ours, rollouts, model, encoder, temperature=temperature, compute_dtype=DTYPES[dtype])
    print(f"  log-probs  {told_gap(gap, dtype)}")
    if not gap.within:
        yield (
            f"the log-probs of {place} are not those of transformers: {gap.mean:.2g} nats a token apart, "
            f"{gap.limit:g} allowed; try worker.actor.share_prefix=false, worker.actor.padding_free=false and "
            "worker.actor.fsdp.mixed_precision_dtype=fp32, and report the model"
        )


def told_gap(gap: Gap, dtype: str) -> str:
    measured = f"{gap.mean:.2g} nats from transformers' own forward on average, {gap.largest:.2g} at most"
    return f"{measured}, over {gap.tokens} tokens of {ROWS} responses; {gap.limit:g} allowed in {dtype}"


def step_problems(run: Run) -> Iterator[str]:
    loop, algorithm_spec = run.loop, run.loop.algorithm_spec
    values = loop.step(loop.done)
    phases = of_phases(values, "perf/seconds_")
    seconds = phases.pop("step")
    sizes = f"{algorithm_spec.prompts_per_step} prompts x {algorithm_spec.sampling.n} responses"
    print(f"  one step   {sizes}: {seconds:.1f} s ({', '.join(f'{name} {s:.1f}' for name, s in phases.items())})")
    peaks = of_phases(values, "perf/peak_gb_")
    highest = max(peaks, key=peaks.__getitem__)
    print(f"  peak       {peaks[highest]:.2f} GiB, in {highest}")
    length = as_clock(seconds * algorithm_spec.total_steps)
    print(f"  the run    {algorithm_spec.total_steps} such steps take about {length}; the first of them is the slowest")
    if values["actor/skipped_steps"]:
        yield "the update had a loss or gradient that is not finite: compute in fp32, and look at the rewards"
    if values["reward/failed"] == 1:
        yield "the rewards of every response failed; see the messages above, and try them by `mtrl reward`"


def of_phases(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
