"""Tables of counts with two rows and two columns: whether two properties go together. a counts what has both, b what
has the first alone, c the second alone, d none; all are float64 tensors with an entry for each table."""

from __future__ import annotations

import torch
from torch import Tensor

AS_LIKELY = 1 + 1e-9  # rounding of a probability


def count_table(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a, b, c, d of each column [K]: the rows with a first property, [N, K] bool, and a second one, [N]."""
    a, b = first[second].sum(0).double(), first[~second].sum(0).double()
    return a, b, second.sum() - a, (~second).sum() - b


def fisher_p_value(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Fisher's two-sided exact test: the probability of all tables with these margins that are not more likely than the
    observed one. At most 1, and exactly 1 if these are all."""
    n = a + b + c + d
    k = torch.arange(int((a + b).max()) + 1, dtype=torch.float64)[:, None]  # in the place of a
    total = log_choose(n, a + b)
    likely = (log_choose(a + c, k) + log_choose(b + d, a + b - k) - total).exp()
    observed = (log_choose(a + c, a) + log_choose(b + d, b) - total).exp()
    p = likely.where(likely <= AS_LIKELY * observed, 0.0).sum(0)
    return p.where(p < 1 / AS_LIKELY, 1.0)


def log_choose(n: Tensor, k: Tensor) -> Tensor:
    """-inf where k is below 0 or above n: there lgamma has its poles."""
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


def information_gain(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """How many bits the rows tell about the columns."""
    n = a + b + c + d
    return entropy(a + c, b + d) - (a + b) / n * entropy(a, b) - (c + d) / n * entropy(c, d)


def entropy(first: Tensor, second: Tensor) -> Tensor:
    """In bits, of a choice that was made so often for each side; 0 if never."""
    shares = torch.stack([first, second]) / (first + second).clamp(min=1)
    return torch.special.entr(shares).sum(0) / torch.log(torch.tensor(2.0, dtype=torch.float64))
