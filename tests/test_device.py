"""Which GPU a process takes; torch's count of GPUs is replaced, since none is here to count."""

import pytest
import torch

from hscache.device import choose_device
from hscache.errors import ConfigError


@pytest.fixture
def gpus(monkeypatch):
    def see(count, **environment):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        for name in ("LOCAL_RANK", "SLURM_LOCALID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return see


@pytest.mark.parametrize(
    ("count", "environment", "number"),
    [
        (4, {}, 0),
        (4, {"LOCAL_RANK": "3"}, 3),
        (4, {"SLURM_LOCALID": "2"}, 2),
        (4, {"LOCAL_RANK": "1", "SLURM_LOCALID": "2"}, 1),
        (1, {"SLURM_LOCALID": "3"}, 0),  # a launcher bound one GPU to each process
    ],
)
def test_a_process_takes_the_gpu_of_its_number(gpus, count, environment, number):
    gpus(count, **environment)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", number)
    assert choose_device("cpu") == torch.device("cpu")


def test_more_processes_than_gpus_are_refused_with_both_numbers(gpus):
    gpus(2, LOCAL_RANK="2")
    with pytest.raises(ConfigError, match=r"number 2 on its machine.*sees 2 GPUs"):
        choose_device("auto")


def test_without_a_gpu_auto_is_the_cpu_and_cuda_an_error(gpus):
    gpus(0)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        choose_device("cuda")
