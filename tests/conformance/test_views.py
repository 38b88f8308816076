"""Other views of the images against plain computations: a forward of transformers for each row and view, in which
nothing attends to the image tokens of the view `none`."""

import pytest
import torch
from helpers import close, same
from tiny_models import (
    VISION_FAMILIES,
    get_encoder,
    plain_inputs,
    plain_log_probs,
    plain_model,
    prompts_for,
    random_rollouts,
    shared_backbone,
)

from mtrl.models.forward import Forward
from mtrl.models.perturb import Perturbation
from mtrl.models.views import ImageViews
from mtrl.types import OF_A_VIEW, VISION_POOL, Needs

GROUP, LENGTHS = [0, 0, 1, 3, 2, 1, 3], [6, 2, 4, 1, 3, 6, 5]
STEP = 3
PIXELS = ("black", "crop(0.6)", "noised(2)", "perturbed", "pixelated(16)")
RECURRENT = tuple(family for family in VISION_FAMILIES if family.startswith("qwen3_5"))
ROUTES = {
    "shared prefix": {"share_prefix": True},
    "a row each": {"share_prefix": False},
    "shared and packed": {"share_prefix": True, "packed": True},
}
pytestmark = pytest.mark.pairwise("family", "route")


@pytest.fixture(params=VISION_FAMILIES)
def family(request):
    return request.param


@pytest.fixture(params=ROUTES)
def forward(request, family):
    return Forward(shared_backbone(family), get_encoder(family), temperature=0.8, **ROUTES[request.param])


def make_rollouts(family):
    return random_rollouts(prompts_for(family), GROUP, LENGTHS)


def show(family, rollouts, names):
    """The media of every prompt under these views."""
    views = ImageViews(Perturbation(seed=5), get_encoder(family).image_settings)
    return {name: [views.media(name, prompt, STEP) for prompt in rollouts.prompts] for name in names}


def measure(forward, rollouts, family, names):
    needs = Needs("old_logprobs", *(f"{quantity}@{name}" for name in names for quantity in OF_A_VIEW))
    assert needs.other_views == tuple(sorted(names)) and not needs.unknown
    return forward.signals(rollouts, needs, show(family, rollouts, names))


@torch.no_grad()
def plain_blind(family, prompt, response, temperature, blocked):
    """[length, V]: without image tokens, the others at their positions; or, with `blocked`, beside image tokens that
    text does not attend to."""
    encoder, model = get_encoder(family), plain_model(family)
    row = plain_inputs(encoder, prompt, response)
    given = encoder.inputs(prompt)["position_ids"]
    after = torch.arange(len(response)) + given.max() + 1
    position_ids = torch.cat([given, after.expand(*given.shape[:-1], -1)], -1).unsqueeze(-2)
    vision = torch.nn.functional.pad(prompt.token_pool == VISION_POOL, (0, len(response)))
    if blocked:
        seen = torch.ones(len(vision), len(vision), dtype=torch.bool).tril() & (vision[:, None] | ~vision)
        window = getattr(model.config.get_text_config(), "sliding_window", None)
        kinds = {"full_attention": seen, "sliding_attention": seen.triu(1 - window)} if window else {"": seen}
        masks = {
            kind: torch.zeros(each.shape).masked_fill(~each, torch.finfo(torch.float32).min)[None, None]
            for kind, each in kinds.items()
        }
        mask = masks if window else masks[""]
        logits = model(**row | {"attention_mask": mask, "position_ids": position_ids}).logits[0]
    else:
        ids = row["input_ids"][:, ~vision]
        logits = model(input_ids=ids, position_ids=position_ids[..., ~vision]).logits[0]
    logits = logits[-len(response) - 1 : -1] / temperature
    logits[:, list(encoder.forbidden_ids)] = -torch.inf
    return logits.log_softmax(-1)


def kl(one, other):
    return (one.exp() * (one - other)).nan_to_num(0.0).sum(-1)


def jsd(one, other):
    middle = torch.logaddexp(one, other) - torch.log(torch.tensor(2.0))
    return (kl(one, middle) + kl(other, middle)) / 2


def group_others(log_probs, top):
    """Those of the top tokens, and of all others as one."""
    chosen = log_probs.gather(-1, top).exp()
    return torch.cat([chosen, 1 - chosen.sum(-1, keepdim=True)], -1).log()


def compare(rollouts, distribution, expected, quantity):
    """[N, T] by definition, in float64; `distribution` and `expected` give [length, V] of a row."""
    rows = []
    for row in range(len(rollouts)):
        p, q = distribution(row).double(), expected(row).double()
        top, tokens = p.topk(100).indices, rollouts.tokens[row, rollouts.mask[row]]
        values = {
            "logprobs": lambda q=q, tokens=tokens: q.gather(-1, tokens[:, None])[:, 0],
            "entropy": lambda q=q: -(q.exp() * q).nan_to_num(0.0).sum(-1),
            "kl": lambda p=p, q=q: kl(p, q),
            "reverse_kl": lambda p=p, q=q: kl(q, p),
            "jsd": lambda p=p, q=q: jsd(p, q),
            "jsd_top100": lambda p=p, q=q, top=top: jsd(group_others(p, top), group_others(q, top)),
        }[quantity]()
        rows.append(torch.nn.functional.pad(values, (0, rollouts.mask.shape[1] - len(values))))
    return torch.stack(rows).float()


def check(signals, rollouts, family, name, expected):
    """`expected`: a function of a row's prompt and response."""

    def row_of(row):
        return rollouts.prompts[int(rollouts.group[row])], rollouts.tokens[row, rollouts.mask[row]]

    with torch.no_grad():
        originals = [plain_log_probs(family, *row_of(row), temperature=0.8) for row in range(len(rollouts))]
        others = [expected(*row_of(row)) for row in range(len(rollouts))]
    for quantity in OF_A_VIEW:
        values = compare(rollouts, originals.__getitem__, others.__getitem__, quantity)
        close(signals.extra[f"{quantity}@{name}"], values, atol=2e-4)
    seen = rollouts.visual[:, None] & rollouts.mask
    assert signals.extra[f"jsd@{name}"][seen].max() > 1e-3, "the view changes something"


@pytest.mark.parametrize("name", PIXELS)
def test_views_of_pixels(name, family, forward):
    rollouts = make_rollouts(family)
    media = dict(zip(map(id, rollouts.prompts), show(family, rollouts, [name])[name], strict=True))
    signals = measure(forward, rollouts, family, [name])
    check(signals, rollouts, family, name, lambda prompt, response: plain_log_probs(
        family, prompt, response, temperature=0.8, view=media[id(prompt)]))  # fmt: skip


@pytest.mark.parametrize("blocked", [False, True])
def test_a_view_without_image_tokens(blocked, family, forward):
    if blocked and family in RECURRENT:
        pytest.skip("a recurrent layer has no mask of tokens: they are skipped")
    if not blocked and family == "gemma3":
        pytest.skip("its windows count the image tokens that nothing attends to")
    rollouts = make_rollouts(family)
    signals = measure(forward, rollouts, family, ["none"])
    check(signals, rollouts, family, "none", lambda prompt, response: plain_blind(
        family, prompt, response, 0.8, blocked and prompt.task.visual))  # fmt: skip


def test_several_views_in_one_pass(family, forward):
    rollouts, names = make_rollouts(family), ["black", "none", "noised(2)", "perturbed"]
    together = measure(forward, rollouts, family, names)
    for name in names:
        alone = measure(forward, rollouts, family, [name])
        close(together.old_logprobs, alone.old_logprobs, atol=1e-4)
        for key, values in alone.extra.items():
            close(together.extra[key], values, atol=1e-4)
    close(together.extra["logprobs@perturbed"], forward.signals(
        rollouts, Needs("perturbed_logprobs"), show(family, rollouts, ["perturbed"])).perturbed_logprobs)  # fmt: skip


def test_a_text_has_one_view(family, forward):
    rollouts = make_rollouts(family)
    signals, text = measure(forward, rollouts, family, ["none", "black"]), ~rollouts.visual
    for name in ("none", "black"):
        same(signals.extra[f"logprobs@{name}"][text], signals.old_logprobs[text])
        assert not signals.extra[f"kl@{name}"][text].any() and not signals.extra[f"reverse_kl@{name}"][text].any()
        assert signals.extra[f"jsd@{name}"][text].max() < 1e-7, "log 2 is rounded"
