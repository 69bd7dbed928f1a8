"""What the scripts of tests/gpu do without a GPU: bounds, jobs, and the folder of a service."""

import sys
from pathlib import Path

import pytest

from minisgl.text import load_tokenizer
from tests.gpu.gpu_jobs import Done, Job, run_jobs
from tests.gpu.limits import limit
from tests.gpu.model_folder import CONFIGS, write_model_folder


@pytest.mark.parametrize(
    ("model", "workload", "tokens_per_second"),
    [
        ("qwen3-0.6b", "decode-1", 3317),
        ("qwen3-14b", "decode-32", 4374),
        # 64 layers of 0.478 billion weights and the LM head, 65.5 GB, at 4.1 TB/s
        ("qwen3-32b", "decode-1", 64.0),
        # of 128 experts a token reads 8
        ("qwen3-30b-a3b", "decode-1", 672),
    ],
)
def test_a_limit_is_the_bytes_of_a_step_over_the_bandwidth(
    model: str, workload: str, tokens_per_second: float
) -> None:
    found = limit(CONFIGS / model, workload)
    assert found.decode_tokens_per_second == pytest.approx(tokens_per_second, rel=2e-3)


def test_ranks_share_a_limit_evenly() -> None:
    one, four = (limit(CONFIGS / "qwen3-32b", "decode-1", ranks) for ranks in (1, 4))
    assert four.output_tokens_per_second == pytest.approx(4 * one.output_tokens_per_second)


def shell(name: str, gpus: int, script: str, limit_seconds: float = 30.0) -> Job:
    return Job(name, gpus, ["sh", "-c", script], {}, limit_seconds)


def test_jobs_beside_each_other_never_share_a_gpu(tmp_path: Path) -> None:
    """Each makes a folder for each of its GPUs, which fails if another one has it."""
    script = (
        "for gpu in $(echo $CUDA_VISIBLE_DEVICES | tr , ' '); do mkdir $gpu || exit 9; done; "
        "sleep 0.2; for gpu in $(echo $CUDA_VISIBLE_DEVICES | tr , ' '); do rmdir $gpu; done"
    )
    jobs = [
        shell(f"{i}", gpus, f"cd {tmp_path}; {script}") for i, gpus in enumerate((4, 2, 1, 2, 1))
    ]
    done: list[Done] = []
    run_jobs(jobs, ["a", "b", "c", "d"], done.append)
    assert sorted(one.job.name for one in done) == ["0", "1", "2", "3", "4"]
    assert [one.code for one in done] == [0] * 5


def test_a_job_that_needs_more_gpus_than_there_are_is_left_out() -> None:
    done: list[Done] = []
    run_jobs([shell("large", 2, "exit 1"), shell("small", 1, "echo me")], ["0"], done.append)
    assert [(one.job.name, one.output) for one in done] == [("small", "me\n")]


def test_a_job_that_takes_too_long_is_ended_and_its_output_kept() -> None:
    done: list[Done] = []
    script = "import sys, time; print('x' * 300_000, flush=True); time.sleep(60)"
    run_jobs([Job("long", 1, [sys.executable, "-c", script], {}, 1.5)], ["0"], done.append)
    assert done[0].code == -9 and len(done[0].output) == 300_001


def test_every_id_of_a_served_folder_has_a_text_of_its_own(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model_folder(CONFIGS / "qwen3-32b", tmp_path / "served"))
    texts = {tokenizer.token_bytes(i) for i in range(151_936)}
    assert len(texts) == tokenizer.vocab_size == 151_936 and b"" not in texts
    assert tokenizer.decode(tokenizer.encode("Why \u00e9?")) == "Why \u00e9?"
