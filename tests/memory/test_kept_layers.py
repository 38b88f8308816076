"""`enable_gradient_checkpointing: auto`: what each layer would keep is measured, how many layers fit is computed, and
the numbers stay the same. There is no GPU here: tensors are counted, and the size of the device is given."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import checkpoint, fresh_backbone, get_encoder, prompts_for

from mtrl.compose import memory_limits
from mtrl.config import load_config
from mtrl.memory import kept_layers
from mtrl.memory.kept_layers import (
    KeepableLayers,
    Measured,
    choose_kept_layers,
    count_fitting,
    find_best_size,
    list_smaller_sizes,
)
from mtrl.memory.live_tensors import LiveTensors
from mtrl.memory.pass_sizes import PassSizes
from mtrl.memory.plan import Plan, list_savings
from mtrl.memory.preflight import DoesNotFit, Limits, MemoryPreflight, longest_rollouts, preflight
from mtrl.models.activation_checkpointing import enable_activation_checkpointing, keepable_layers, vision_layers
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.models.parallel.ranks import Ranks
from mtrl.types import Needs, Sampling
from mtrl.workers.micro_batches import MicroBatching

LIMITS = Limits(
    prompts=4, prompts_per_update=4, sampling=Sampling(n=8, max_new_tokens=16), prompt_tokens=90, max_pixels=56**2,
    update=MicroBatching(at_least=1000), probe=MicroBatching(at_least=4000), needs=Needs("old_logprobs"),
)  # fmt: skip
GROUP = 90 + 8 * 16  # tokens; a step has four: 872
SIZES = [count * GROUP for count in (4, 3, 2, 1)]


# ----------------------------------------------------------------------------------------------------------- the choice
@given(costs=st.lists(st.integers(0, 50)), room=st.integers(-100, 1000), more=st.integers(0, 100))
def test_as_many_layers_as_fit(costs, room, more):
    kept = count_fitting(costs, room)
    assert kept == 0 or sum(costs[:kept]) <= room
    assert kept == len(costs) or sum(costs[: kept + 1]) > room, "one more does not fit"
    assert count_fitting(costs, room + more) >= kept


class SimulatedDevice:
    """An update takes `base` bytes per token, and `cost` more for each of eight layers that keeps its activations. One
    that needs several passes starts the later ones with `gradients`."""

    def __init__(self, room, base=10, cost=3, room_after_all=None, gradients=0, limits=LIMITS):
        self.room, self.base, self.cost, self.gradients, self.updates = room, base, cost, gradients, []
        self.room_after_all = room if room_after_all is None else room_after_all
        self.rollouts = longest_rollouts(get_encoder("qwen2"), limits, limits.prompts_per_update)
        self.whole = self.size(limits)
        blocks = [SimpleNamespace(gradient_checkpointing=True, _gradient_checkpointing_func=None) for _ in range(8)]
        self.layers = KeepableLayers(blocks, allocated=lambda: 0, spare=lambda: 0)
        self.show(self.whole)

    def size(self, limits):
        """Tokens of the largest pass, however its size is set."""
        return replace(limits.update, rows=None).largest(self.rollouts)

    def measure(self, tokens):
        held = self.base * tokens + (self.gradients if tokens < self.whole else 0)
        return Measured(self.room - held, [self.cost * tokens] * 8)

    def show(self, tokens):
        self.layers.measured = self.measure(tokens)
        self.layers.fitting = self.layers.measured.fitting

    def run_update(self, limits, watch_update=None):
        tokens = self.size(limits)
        kept = sum(not layer.gradient_checkpointing for layer in self.layers.layers) if watch_update is None else 0
        self.updates.append((tokens, kept))
        if watch_update is not None:
            self.show(tokens)
        peak = (self.base + self.cost * kept) * tokens
        if peak > self.room_after_all:
            raise DoesNotFit("update", "memory: it does not fit")
        return {"update": peak}

    def choose(self, at_least=GROUP, verify=True, limits=LIMITS):
        learner = SimpleNamespace(kept_layers=(), configured_batching=limits.update)
        arguments = (self.layers, self.run_update, limits, get_encoder("qwen2"), learner)
        return choose_kept_layers(*arguments, at_least=at_least, verify=verify), learner


@settings(max_examples=60)
@given(
    room=st.integers(40 * GROUP, 160 * GROUP),
    at_least=st.sampled_from([GROUP, GROUP + 1, 3 * GROUP]),
    cost=st.sampled_from([3, 20, 1000]),
    gradients=st.sampled_from([0, 0, 2 * GROUP, 20 * GROUP]),
)
def test_the_size_that_keeps_most_layers(room, at_least, cost, gradients):
    """At most two sizes are measured, and the choice is that of measuring all of them. Where gradients bend the line it
    may be another one, which was measured too."""
    device = SimulatedDevice(room, cost=cost, gradients=gradients)
    best, kept = find_best_size(device.layers, device.run_update, LIMITS, get_encoder("qwen2"), at_least)
    allowed = [SIZES[0], *(size for size in SIZES[1:] if size >= at_least)]
    counts, tokens = {size: device.measure(size).fitting for size in allowed}, device.size(best)
    assert len(device.updates) <= 2 and {*device.updates} <= {(size, 0) for size in allowed[1:]}
    assert best.probe == LIMITS.probe
    assert kept == counts[tokens] >= max(counts[allowed[0]], counts[allowed[-1]]), "it fits: it was measured"
    if not gradients:
        most = max(counts.values())
        assert (tokens, kept) == (max(size for size in allowed if counts[size] == most), most)


def test_two_of_many_sizes_are_measured():
    limits = replace(LIMITS, prompts_per_update=32, update=MicroBatching(at_least=32 * GROUP))
    device = SimulatedDevice(room=14 * GROUP * (10 + 3 * 8), limits=limits)
    sizes = [device.size(each) // GROUP for each in list_smaller_sizes(limits, device.rollouts, GROUP)]
    assert sizes == [24, 18, 13, 9, 6, 4, 3, 2, 1] and device.whole == 32 * GROUP
    best, kept = find_best_size(device.layers, device.run_update, limits, get_encoder("qwen2"), GROUP)
    assert (device.size(best), kept) == (13 * GROUP, 8), "all layers fit with 14 groups and fewer"
    assert device.updates == [(GROUP, 0), (13 * GROUP, 0)]


def test_the_learner_keeps_what_was_chosen(capfd):
    """Room for 8 layers with 436 tokens, and for 2 with 872."""
    device = SimulatedDevice(room=436 * (10 + 3 * 8))
    peaks, learner = device.choose()
    assert device.updates == [(218, 0), (436, 0), (436, 8)], "measured, then verified"
    assert peaks == {"update": device.room}
    assert [layer.gradient_checkpointing for layer in device.layers.layers] == [False] * 8
    assert len(learner.kept_layers) == 8 and learner.configured_batching == LIMITS.update.within(654 * 3 // 4)
    said = "gradient checkpointing: auto keeps the activations of 8 of 8 layers, in passes of 436 tokens\n"
    assert capfd.readouterr().err == said


@pytest.mark.parametrize(("update", "size"), [(MicroBatching(900), "872 tokens"), (MicroBatching(rows=32), "32 resp")])
def test_a_size_that_the_user_chose_stays(update, size, capfd):
    device = SimulatedDevice(room=872 * (10 + 3 * 2))
    _, learner = device.choose(at_least=None, limits=replace(LIMITS, update=update))
    assert len(learner.kept_layers) == 2 and learner.configured_batching is update
    assert f"2 of 8 layers, in passes of {size}" in capfd.readouterr().err


def test_activations_that_do_not_fit_after_all(capfd):
    device = SimulatedDevice(room=436 * 34, room_after_all=872 * 10)
    peaks, learner = device.choose()
    assert peaks == {} and len(learner.kept_layers) == 0 and learner.configured_batching is LIMITS.update
    assert all(layer.gradient_checkpointing for layer in device.layers.layers)
    assert "there was no room for the activations of 8 layers after all\n" in capfd.readouterr().err


def test_ranks_are_not_verified():
    device = SimulatedDevice(room=436 * 34)
    device.choose(verify=False)
    assert device.updates == [(218, 0), (436, 0)]


def test_all_ranks_keep_the_smallest_number():
    class OneOfTwo(Ranks):
        def all_reduce_max(self, number):
            return max(number, -2)  # the other has room for two

    layers = [SimpleNamespace(gradient_checkpointing=False, _gradient_checkpointing_func=None) for _ in range(3)]
    keepable = KeepableLayers(layers, allocated=lambda: 0, spare=lambda: 100, ranks=OneOfTwo(None, 0, 2))
    with keepable.measure():
        assert all(layer.gradient_checkpointing for layer in layers)
    assert keepable.fitting == 2


def test_a_margin_of_the_device_stays_free(monkeypatch):
    """Of 100 bytes other processes have 20 and torch reserved 30; 25 were in use at the peak."""
    told = {"mem_get_info": (50, 100), "memory_reserved": 30, "max_memory_allocated": 25}
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert kept_layers.spare_bytes(torch.device("cuda")) == int(0.92 * 80) - 25


# --------------------------------------------------------------------------------------------------------- real passes
def make_forward(family):
    model = load_model(checkpoint(family))
    forward = Forward(Backbone(model), get_encoder(family))
    enable_activation_checkpointing(model, "auto")
    return forward


def short_limits():
    sampling = Sampling(n=2, max_new_tokens=8)
    return replace(
        LIMITS, prompts=2, prompts_per_update=2, prompt_tokens=60, sampling=sampling, update=MicroBatching(80)
    )


def test_the_order_of_layers():
    model = make_forward("qwen2_5_vl").backbone.model
    language, tower = model.model.language_model.layers, model.model.visual.blocks
    assert keepable_layers(model) == [*reversed(language), *reversed(tower)]
    model.model.visual.requires_grad_(False)
    assert keepable_layers(model) == [*reversed(language)], "a frozen tower recomputes nothing"


@pytest.mark.parametrize(
    ("family", "ahead"),
    [("qwen2_5_vl", False), ("qwen2_5_vl", True), pytest.param("qwen3_5", True, marks=pytest.mark.slow)],  # 3 s each
)
def test_kept_layers_cost_what_was_measured_and_change_no_numbers(family, ahead):
    """Of none, one, the language model and all layers: gradients bitwise equal, fewer recomputations, a peak of at most
    the prediction, also where the images of the next pass are encoded ahead."""
    forward, limits = make_forward(family), replace(short_limits(), encodes_ahead=ahead)
    model, passes = forward.backbone.model.train(), MemoryPreflight(forward, forward.encoder, limits)
    layers, found = keepable_layers(model), {}
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    computed = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: computed.append(1))

    def update():
        computed.clear()
        model.zero_grad()
        with LiveTensors() as live:
            passes.update()
        return [weight.grad for weight in weights], live.peak, len(computed)

    with LiveTensors() as live:
        keepable = KeepableLayers(layers, allocated=lambda: live.now, spare=lambda: 0)
        keepable.twice = vision_layers(model, layers) if ahead else []
        assert len(keepable.twice) == ahead * len(model.model.visual.blocks)
        with keepable.measure(), kept_layers.measure_recomputed(layers, lambda: live.now) as costs:
            passes.update()
    costs = [cost * (1 + (layer in keepable.twice)) for layer, cost in zip(layers, costs, strict=True)]
    for count in (0, 1, len(forward.backbone.language_model.layers), len(layers)):
        keepable.keep(count)
        found[count] = update()
    gradients, base, _ = found[0]
    for count, (theirs, peak, calls) in found.items():
        assert all(map(torch.equal, theirs, gradients))
        assert peak <= base + sum(costs[:count]), f"{count} layers"
        both = 2 * (2 * len(layers) - count) + 2 * len(keepable.twice)
        assert calls == both, "in each of two passes once, once more if recomputed, and ahead"
    assert found[len(layers)][1] > 0.6 * (base + sum(costs)), "the prediction is not far off"


def test_the_choice_on_a_small_device():
    """The whole procedure on a device of a given size, where tensors are counted: what it chooses fits."""
    forward, limits = make_forward("qwen2"), replace(short_limits(), prompts_per_update=1)
    layers, learner = keepable_layers(forward.backbone.model), SimpleNamespace(configured_batching=limits.update)

    def choose(size):
        with LiveTensors() as live:
            keepable = KeepableLayers(layers, lambda: live.now, lambda: size - live.peak)
            run = lambda limits, **options: preflight(  # noqa: E731
                forward, forward.encoder, limits, None, has_states=True, only=["update"], **options
            )
            (first,) = run(limits, watch_update=keepable.measure).values()
            peaks = choose_kept_layers(keepable, run, limits, forward.encoder, learner, at_least=None, verify=True)
        return first, live.peak, peaks, len(learner.kept_layers)

    base, *_ = choose(0)
    _, all_kept, _, count = choose(1 << 40)
    assert count == len(layers) == 3
    for size in (base, (base + all_kept) // 2):
        _, used, peaks, kept = choose(size)
        assert used <= size and bool(peaks) == bool(kept)


@pytest.mark.parametrize(
    ("setting", "spare", "forbidden", "kept"),
    [("auto", 0, False, 3), ("auto", -1, False, 0), ("auto", 0, True, 0), (True, 0, False, 0)],
)
def test_which_runs_choose(setting, spare, forbidden, kept, tmp_path, monkeypatch, capfd):
    """The start of a run on a GPU, where the passes are left out: no layer costs anything."""
    words = {"worker.actor.model.model_path": str(checkpoint("qwen2"))}
    config = load_config(None, {**words, "worker.actor.model.enable_gradient_checkpointing": setting})
    forward, phases = make_forward("qwen2"), []
    monkeypatch.setattr(Backbone, "device", torch.device("cuda"))
    monkeypatch.setattr(kept_layers, "spare_bytes", lambda device: spare)
    monkeypatch.setattr(memory_limits.RememberedSizes, "reuse_or_search", lambda self, search, *_: search())
    monkeypatch.setattr(memory_limits, "describe_start", lambda *_, **__: {})

    def run_nothing(policy, encoder, limits, *, watch_update=nullcontext, only=("all",), **options):
        phases.append((*only, limits.update.tokens))
        with watch_update():
            return {"update": 2**30}

    monkeypatch.setattr(memory_limits, "preflight", run_nothing)
    pass_sizes = PassSizes(tmp_path / "passes.json")
    if forbidden:
        pass_sizes.write("kept_layers", 0)
    learner = SimpleNamespace(
        kept_layers=(), configured_batching=MicroBatching(at_least=32768), cut_to=0, encodes_ahead=False
    )
    arguments = (config, forward, None, Needs(), False, [learner])
    memory_limits.preflight_on_gpu(*arguments, pass_sizes=pass_sizes if forbidden else None)
    layers = forward.backbone.language_model.layers
    assert len(learner.kept_layers) == kept == sum(not layer.gradient_checkpointing for layer in layers)
    assert phases[0] == ("all", None) and (("optimizer", "update", None) in phases) == bool(kept)
    said = capfd.readouterr().err
    assert ("auto keeps the activations of" in said) == (setting == "auto" and not forbidden)
    assert "memory at the limits: update 1.0 GiB" in said


# -------------------------------------------------------------------------------------------------- the next attempt
def test_ranks_that_were_full_keep_no_layers_when_they_restart(tmp_path):
    pass_sizes, learner = PassSizes(tmp_path / "passes.json"), SimpleNamespace(name="actor")
    pass_sizes.apply(learner)
    assert pass_sizes.may_keep_layers
    learner.keep_cut(100)
    assert pass_sizes.may_keep_layers
    learner.forbid_kept_layers()
    assert not pass_sizes.may_keep_layers
    pass_sizes.apply(learner)
    assert learner.cut_to == 100


def test_layers_that_are_recomputed_anyway_are_no_advice():
    way = "worker.actor.model.enable_gradient_checkpointing=true"
    savings = {what: way in list_savings(Plan(LIMITS, checkpointing=what)) for what in (False, "mlp", True, "auto")}
    assert savings == {False: True, "mlp": True, True: False, "auto": False}


@pytest.mark.parametrize("what", [True, "auto", "mlp", "attention"])
def test_a_frozen_tower_has_no_backward_pass(what):
    backbone, encoder = fresh_backbone("qwen2_5_vl"), get_encoder("qwen2_5_vl")
    enable_activation_checkpointing(backbone.model, what)
    backbone.model.train()
    inputs = [encoder.inputs(each, None) for each in prompts_for("qwen2_5_vl") if each.task.visual]
    for trained in (True, False):
        backbone.vision_tower.requires_grad_(trained)
        assert all(features.embeds.requires_grad == trained for features in backbone.encode_images(inputs))
