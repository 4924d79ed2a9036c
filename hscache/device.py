"""Devices and dtypes by the names users write; imports torch and nothing else."""

import os

import torch

from hscache.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def choose_device(name: str) -> torch.device:
    """Resolve auto / cpu / cuda; under a launcher cuda means the GPU of this process.

    torchrun and accelerate set LOCAL_RANK, srun sets SLURM_LOCALID. A single visible GPU is taken
    whatever the number: launchers that bind one to each process show it as number 0. Raises
    ConfigError when cuda is asked for and torch sees none, or when there are several and none of
    that number.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is cuda, and torch sees no CUDA device; set device to cpu.")
    index = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    visible = torch.cuda.device_count()
    if visible == 1:
        return torch.device("cuda", 0)
    if index >= visible:
        raise ConfigError(
            f"this process is number {index} on its machine, counted from 0, and torch sees "
            f"{visible} GPUs. Start at most {visible} processes a machine."
        )
    return torch.device("cuda", index)
