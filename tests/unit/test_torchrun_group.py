"""Which GPU a process of torchrun uses, and how it communicates."""

from mtrl.distributed.torchrun_group import choose_device


def test_every_process_has_its_own_gpu_and_nccl(caplog):
    assert [choose_device(rank, 4, 4) for rank in range(4)] == [(rank, "nccl") for rank in range(4)]
    assert choose_device(0, 0, 1) == (0, "nccl"), "not started by torchrun"
    assert not caplog.records


def test_processes_that_share_gpus_communicate_by_gloo_and_the_first_one_warns(caplog):
    assert [choose_device(rank, 4, 2) for rank in range(4)] == [(0, "gloo"), (1, "gloo"), (0, "gloo"), (1, "gloo")]
    (warning,) = caplog.records
    assert "4 processes share 2 GPUs" in warning.getMessage() and "one for each GPU" in warning.getMessage()
