"""Top-k and top-p of vLLM, as they are defined."""

from __future__ import annotations


def cut_by_sorting() -> None:
    """Lets vLLM sort the logits of a step to apply top-k and top-p; call it before an engine starts.

    Why: its Triton kernel (0.32, on a GPU) leaves other tokens than the definition, so that responses have tokens that
    the trainer's distribution does not: PLACEHOLDER. vLLM's own PyTorch code, which a CPU runs, is exact.
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False  # of this module alone
