"""Shared helpers of the tests of decoding."""

import copy

import torch
import torch_ops as plain
from tiny_models import get_encoder

from mtrl.rollout.decode.engine import GraphGenerator
from mtrl.rollout.decode.step import Ops


def stopping_encoder(family):
    """An encoder with many stop tokens, so that rows end early."""
    encoder = copy.copy(get_encoder(family))
    encoder.stop_ids = tuple(range(4, 512, 7))
    return encoder


def engine(backbone, encoder, ops=None, **more):
    return GraphGenerator(backbone, encoder, ops=ops or Ops(plain, plain), buckets=(16, 32), poll=1, **more)


def same(found, expected):
    assert torch.equal(found.mask, expected.mask) and torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.rollout_logprobs, expected.rollout_logprobs, rtol=0, atol=1e-5)
