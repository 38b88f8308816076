"""`mtrl doctor --try`: a trial with the real weights before a long run. It loads them, compares our log-probs with
transformers' own forward, does one whole step at the configured sizes, and deletes what it wrote."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from mtrl.commands.load_arguments import check_call
from mtrl.compose.policy import build_encoder, load_options, model_path
from mtrl.compose.run import build
from mtrl.config import Config, ConfigError
from mtrl.models.load_model import DTYPES, load_model
from mtrl.models.parity import log_prob_gap
from mtrl.tracking.pace import format_duration
from mtrl.training.resumable_run import Run
from mtrl.types import Needs
from mtrl.utils.errors import RunError, StartError

RESPONSES, TOKENS = 2, 32  # responses whose log-probs are compared, and their most tokens


def run_trial(config: Config) -> Iterator[str]:
    """Build the run as training does and try it: print the findings and yield the problems."""
    print("\nThe trial, in a temporary directory")
    try:
        with tempfile.TemporaryDirectory(prefix="mtrl-try-", ignore_cleanup_errors=True) as folder:
            run = check_call(build, redirect_outputs(config, folder))
            with run.closing:
                yield from check_parity(config, run)
                run.preflight()
                yield from check_step(run)
    except (ConfigError, StartError, RunError) as error:
        yield str(error)
    except torch.OutOfMemoryError as error:
        yield f"memory: it does not fit into the device: {str(error).splitlines()[0]}"


def redirect_outputs(config: Config, folder: str) -> Config:
    """The same run without loggers, which writes all its files under `folder`."""
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


def check_parity(config: Config, run: Run) -> Iterator[str]:
    """Compare the log-probs of sampled responses by the run's actor with those of transformers."""
    loop, spec = run.loop, run.loop.spec
    path = str(run.start.checkpoint or model_path(config))
    tokens = min(TOKENS, spec.sampling.max_new_tokens)
    sampling = replace(spec.sampling, n=1, max_new_tokens=tokens, step=loop.done, version=loop.version)
    with loop.components.generator.resident():
        rollouts = loop.components.generator.generate(loop.components.source.take(RESPONSES), sampling)
    ours = loop.components.actor.probe(rollouts, Needs("old_logprobs"), None).old_logprobs
    assert ours is not None, "requested by Needs"
    model = load_model(path, **load_options(config))
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"  loaded     {path}: {millions:,.1f} million parameters on {model.device.type}")
    temperature, dtype = config.worker.rollout.temperature, config.worker.actor.fsdp.mixed_precision_dtype
    encoder = build_encoder(config)
    gap = log_prob_gap(ours, rollouts, model, encoder, temperature=temperature, compute_dtype=DTYPES[dtype])
    measured = f"{gap.mean:.2g} nats from transformers' own forward on average, {gap.largest:.2g} at most"
    over = f"over {gap.tokens} tokens of {RESPONSES} responses"
    print(f"  log-probs  {measured}, {over}; {gap.limit:g} allowed in {dtype}")
    if not gap.within:
        yield (
            f"the log-probs of {path} differ from those of transformers by {gap.mean:.2g} nats per token, "
            f"{gap.limit:g} allowed; try worker.actor.share_prefix=false, worker.actor.padding_free=false and "
            "worker.actor.fsdp.mixed_precision_dtype=fp32, and report the model"
        )


def check_step(run: Run) -> Iterator[str]:
    loop, spec = run.loop, run.loop.spec
    values = loop.step(loop.done)
    phases = strip_prefix(values, "perf/seconds_")
    seconds = phases.pop("step")
    sizes = f"{spec.prompts_per_step} prompts x {spec.sampling.n} responses"
    print(f"  one step   {sizes}: {seconds:.1f} s ({', '.join(f'{name} {s:.1f}' for name, s in phases.items())})")
    peaks = strip_prefix(values, "perf/peak_gb_")
    highest = max(peaks, key=peaks.__getitem__)
    print(f"  peak       {peaks[highest]:.2f} GiB, in {highest}")
    length = format_duration(seconds * spec.total_steps)
    print(f"  the run    {spec.total_steps} such steps take about {length}; the first of them is the slowest")
    if values["actor/skipped_steps"]:
        yield "the update had a loss or gradient that is not finite: compute in fp32, and look at the rewards"
    if values["reward/failed"] == 1:
        yield "the rewards of every response failed; see the messages above, and try them with `mtrl reward`"


def strip_prefix(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
