"""`minisgl compile`: kernels of products for Hopper before there is a GPU, as in an image."""

import argparse
import time
from pathlib import Path

from minisgl.cli.flags import Parser, Run
from minisgl.config import StartError, UsageError
from minisgl.lifecycle import Lifecycle


def add_arguments(parser: Parser) -> Run:
    """Declare the arguments."""
    parser.add_argument(
        "--model",
        metavar="DIR",
        action="append",
        help="folder with a config.json; may be given several times (default: common models)",
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        help="where to, for MINISGL_BUILT_KERNELS (default: the kernel cache of this user)",
    )
    return run


def run(args: argparse.Namespace, life: Lifecycle) -> int:
    """Compile; raises `UsageError` for a wrong path and `StartError` where nothing compiles."""
    from minisgl.models.ahead import COMMON, product_variants, widths_of
    from minisgl.models.config import load_model_config
    from minisgl_kernels.build import KernelUnavailable, cache_root
    from minisgl_kernels.cuda_build import compile_ahead

    models = [widths_of(load_model_config(Path(folder))) for folder in args.model or []]
    folder = Path(args.folder).absolute() if args.folder else cache_root()
    began = time.monotonic()
    try:
        count = compile_ahead(product_variants(models or COMMON.values()), (9, 0), folder)
        if args.folder:  # who reads it may be another user, as in an image
            for kept in filter(Path.is_dir, folder.iterdir()):
                kept.chmod(0o755)
    except KernelUnavailable as error:
        raise StartError(str(error)) from error
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {error.strerror or error}; name a folder by --folder"
        ) from error
    print(f"{folder}: {count} kernels, in {time.monotonic() - began:.0f} s")
    return 0
