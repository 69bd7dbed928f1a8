"""A folder for `minisgl serve --load-format dummy`: `python -m tests.gpu.model_folder NAME DIR`.

NAME is one of `configs`, or a folder with a config.json. The service must turn tokens into text, so
beside the config there is a byte-level tokenizer with a text of its own for each id of the model:
single bytes, then made-up words. Texts are encoded byte by byte.
"""

import itertools
import json
import shutil
import string
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIGS = Path(__file__).parent / "configs"
SPACE = "\u0120"
"""What byte-level vocabularies write for a space."""


def vocabulary(size: int) -> dict[str, int]:
    """Every byte, then words of rising length."""
    words = (
        SPACE + "".join(letters)
        for length in itertools.count(2)
        for letters in itertools.product(string.ascii_lowercase, repeat=length)
    )
    names = itertools.chain(sorted(pre_tokenizers.ByteLevel.alphabet()), words)
    return {name: i for i, name in enumerate(itertools.islice(names, size))}


def write_model_folder(source: Path, folder: Path) -> Path:
    """Write config and tokenizer into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "config.json", folder / "config.json")
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(size), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


if __name__ == "__main__":
    given = Path(sys.argv[1])
    write_model_folder(given if given.is_dir() else CONFIGS / given, Path(sys.argv[2]))
