"""Per-token signals: visual dependency S (SPEC 1.2) and attention grounding VGR, AEI (SPEC 2)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from mtrl.types import SEGMENTS, TEXT_POOL, VISION_POOL, Prompt, Signal, TokenStates
from mtrl.utils.errors import RunError
from mtrl.utils.user_code import call_user_code, check_shape

LOG_RATIO_LIMIT = 20.0  # exp(20) is 5e8: a larger ratio carries no information, and float32 soon overflows
DEPENDENCY_LIMIT = 10.0
# S that rounding alone can make: S is half the square of a difference of log-probs, and two passes agree to about 1e-5
# with float32 products and 1e-3 with TF32 ones. (With bf16 rounding makes more, which looks like a signal.)
DEPENDENCY_NOISE = 1e-6
ENTROPY_NOISE = 1e-6  # nats: what float32 leaves of the entropy of a certain token, summed over the vocabulary
MASS_FLOOR = 1e-8
SHIFTS = ("image_share", "text_share", "image_shift", "text_shift")
ATTENTION = ("attention_mass", "prompt_attention_mass", "attention_maps", *SHIFTS)  # signals that need attention
TEXT, VISION = 0, 1  # the last axis of a mass


def low_var_kl(log_ratio: Tensor) -> Tensor:
    """exp(x) - x - 1 with x = log q/p: a non-negative estimate of KL(p || q) from samples of p.

    Near 0 it is x²/2; expm1 keeps these small values, and so the ranking of most tokens, accurate in float32.
    """
    x = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return x.expm1() - x


def visual_dependency(old: Tensor, perturbed: Tensor, mask: Tensor) -> Tensor:
    """S [N, T] by `low_var_kl`: the change of the sampled token's log-prob when the image is perturbed."""
    return bounded_dependency(low_var_kl(perturbed - old), mask)


def bounded_dependency(kl: Tensor, mask: Tensor) -> Tensor:
    """S [N, T] from an estimate of KL(pi(.|I) || pi(.|I')): `vocab.full_kl` for `full_kl`. 0 off the mask."""
    return kl.clamp(0.0, DEPENDENCY_LIMIT).where(mask, 0.0)


def measure_signal(signal: Signal, original: TokenStates, perturbed: TokenStates | None = None) -> Tensor:
    """[M, *shape] float32: the values of a user's signal. The run ends if they are not what its class declares."""
    what = f"signal {type(signal).__name__}"
    values = call_user_code(what, lambda: signal.measure(original, perturbed))
    check_shape(what, values, (len(original.tokens), *signal.shape), "one row per token, of its `shape`")
    if not values.isfinite().all():
        raise RunError(f"{what} returned NaN or infinity")
    return values.float()


def layer_segments(layers: int, last_k: int | None = None, weight_last_k: int | None = None) -> list[range]:
    """The layers of each of SEGMENTS. Thirds as in numpy's array_split: the first ones take the remainder. Token
    weights read the layers of `all` unless `weight_last_k` is set.

    >>> layer_segments(4, last_k=2, weight_last_k=1)
    [range(0, 2), range(2, 3), range(3, 4), range(2, 4), range(3, 4)]
    """
    base, remainder = divmod(layers, 3)
    ends = [0]
    for third in range(3):
        ends.append(ends[-1] + base + (third < remainder))
    thirds = [range(start, end) for start, end in pairwise(ends)]

    def last(k: int | None) -> range:
        return range(0 if k is None else max(layers - k, 0), layers)

    return [*thirds, last(last_k), last(last_k if weight_last_k is None else weight_last_k)]


def pool_sizes(prompts: tuple[Prompt, ...]) -> Tensor:
    """[P, 2]: how many prompt tokens the text and the vision pool hold."""
    return torch.tensor([[int((p.token_pool == pool).sum()) for pool in (TEXT_POOL, VISION_POOL)] for p in prompts])


def vgr(mass: Tensor, sizes: Tensor) -> Tensor:
    """(A_T / |T|) / (A_O / |O|) from the mass [..., 2] and the pool sizes [..., 2]; NaN where a pool is empty.

    1 is balance, above 1 text dominates. SPEC calls it VGR and MDI.
    """
    density = mass.clamp(min=MASS_FLOOR) / sizes
    return (density[..., TEXT] / density[..., VISION]).where((sizes > 0).all(-1), torch.nan)


def aei(mass: Tensor, sizes: Tensor) -> Tensor:
    """[..., 2]: share of the attention over share of the tokens, for text and vision; NaN where a pool is empty."""
    floored = mass.clamp(min=MASS_FLOOR)
    share = floored / floored.sum(-1, keepdim=True)
    fair_share = sizes / sizes.sum(-1, keepdim=True)
    return (share / fair_share).where((sizes > 0).all(-1, keepdim=True), torch.nan)


def sequence_mass(mass: Tensor, mask: Tensor) -> Tensor:
    """[N, T, S, 2] -> [N, S, 2]: the mean over a response's tokens. Ratios of a sequence are ratios of these means.

    A row without any token gets NaN (not applicable).
    """
    kept = mass.double().where(mask[:, :, None, None], 0.0)
    return (kept.sum(1) / mask.sum(1)[:, None, None]).to(mass.dtype)


def segment(mass: Tensor, name: str) -> Tensor:
    """The mass [..., 2] of one of SEGMENTS, from [..., S, 2]."""
    return mass[..., SEGMENTS.index(name), :]
