"""Devices and dtypes by the names users write; imports torch and nothing else."""

import os

import torch

from hscache.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def choose_device(name: str) -> torch.device:
    """Resolve auto / cpu / cuda; under a launcher cuda means the GPU of this process.

    torchrun and accelerate set LOCAL_RANK, srun sets SLURM_LOCALID. Raises ConfigError when a GPU
    is asked for and none is there, or not that many.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is cuda, and torch sees no CUDA device; set device to cpu.")
    index = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    visible = torch.cuda.device_count()
    # A launcher that binds one GPU to each process shows it as number 0.
    return torch.device("cuda", 0 if visible == 1 else index)
