"""Which device a rank computes on."""

import hashlib

import torch

from minisgl.config import StartError


def select_device(name: str, rank: int) -> torch.device:
    """The device that `--device` names for this rank; a CUDA device becomes the current one.

    Ranks that see several GPUs take them in turn; a rank that sees one (a pod, or a child with
    its own CUDA_VISIBLE_DEVICES) takes that. `StartError` where cuda is asked for and is not there.
    """
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        if name == "auto":
            return torch.device("cpu")
        why = (
            "this torch is built without CUDA: install the CUDA build"
            if torch.version.cuda is None
            else "no GPU is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
        raise StartError(f"--device cuda cannot be used ({why}); or use --device cpu")
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return device


def gpu_id(device: torch.device) -> int:
    """63 bits that are the same for all ranks on one GPU."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    digest = hashlib.blake2b(uuid.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
