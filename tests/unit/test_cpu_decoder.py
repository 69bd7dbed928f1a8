"""All layers in one call on a CPU: the logits of torch's operators, for every dense family."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.attention import cpu_backend
from minisgl.attention.base import AttentionContext, Needs
from minisgl.attention.registry import backend_names, make_backend
from minisgl.config import UsageError
from minisgl.engine.sampler import Sampler
from minisgl.models.config import load_model_config
from minisgl_kernels.build import DISABLE_ENV, KernelUnavailable
from minisgl_kernels.cpu_decoder import PHASES
from minisgl_kernels.cpu_matmul import ISA_ENV, ISAS, best_isa
from tests.tiny import FAMILIES, VOCAB, build_tiny, reference_logits
from tests.unit.models.stepper import LENGTH, Stepper
from tests.unit.sanitizer import needs_compiler, run_sanitized

pytestmark = needs_compiler
Tiny = Callable[[str], Path]
DENSE = [name for name, (prefix, _) in FAMILIES.items() if "Moe" not in prefix]


def isas() -> list[str]:
    try:
        return list(ISAS[: best_isa() + 1])
    except KernelUnavailable:
        return []


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    base = tmp_path_factory.mktemp("tiny")

    def get(family: str) -> Path:
        folder = base / family
        return folder if folder.exists() else build_tiny(folder, family)

    return get


def random_prompts(*lengths: int, seed: int = 3) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCAB, (n,), generator=random).tolist() for n in lengths]


def packed(folder: Path, threads: int = 1, page_size: int = 1, int8: bool = False) -> Stepper:
    stepper = Stepper(folder, dtype=torch.bfloat16, page_size=page_size)
    stepper.model.pack(LENGTH, threads, int8=int8)
    return stepper


def steps(stepper: Stepper) -> torch.Tensor:
    """Logits of prefills, of a mixed step, of chunks, and of decodes."""
    a, b, c = random_prompts(70, 9, 150)
    works: list[list[tuple[int, list[int], int]]] = [
        [(0, a[:64], 0), (1, b[:1], 0)],
        [(0, a[64:65], 64), (2, c[:40], 0), (1, b[1:8], 1)],
        [(2, c[40:149], 40), (1, b[8:], 8), (0, a[65:69], 65)],
        [(0, a[69:], 69), (2, c[149:], 149)],
    ]
    return torch.cat([stepper.step(*work).float().clone() for work in works])


def expected(folder: Path) -> torch.Tensor:
    a, b, c = reference_logits(folder, random_prompts(70, 9, 150))
    return torch.stack((a[63], b[0], a[64], c[39], b[7], c[148], b[8], a[68], a[69], c[149]))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("family", DENSE)
def test_every_dense_family_is_as_close_to_float32_as_torch_is(family: str, tiny: Tiny) -> None:
    want = expected(tiny(family))
    of_torch = error(steps(Stepper(tiny(family), dtype=torch.bfloat16)), want)
    assert error(steps(packed(tiny(family))), want) < 1.3 * of_torch < 0.1


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("family", ["llama-bias", "llama-9-3", "qwen3-tied"])
def test_every_instruction_set_computes_them(
    family: str, isa: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = expected(tiny(family))
    of_torch = error(steps(Stepper(tiny(family), dtype=torch.bfloat16)), want)
    monkeypatch.setenv(ISA_ENV, isa)
    stepper = packed(tiny(family), threads=2)
    assert stepper.model.packed is not None
    assert stepper.model.packed.isa == isa
    assert error(steps(stepper), want) < 1.3 * of_torch


@pytest.mark.parametrize("family", ["qwen2-6-2-tied", "llama"])
def test_int8_weights_stay_close(family: str, tiny: Tiny) -> None:
    assert error(steps(packed(tiny(family), int8=True)), expected(tiny(family))) < 0.15


def test_threads_and_page_size_change_no_bit(tiny: Tiny) -> None:
    alone = steps(packed(tiny("qwen2")))
    for threads, page_size in ((2, 1), (4, 16), (1, 64)):
        assert torch.equal(steps(packed(tiny("qwen2"), threads, page_size)), alone)


@pytest.mark.parametrize("isa", isas())
def test_a_row_gets_the_same_bits_whatever_else_is_in_the_batch(
    isa: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ISA_ENV, isa)
    prompts = random_prompts(30, 41, 9, 100, 65)
    stepper = packed(tiny("llama"), threads=2)
    whole = stepper.step(*((i, p[:-1], 0) for i, p in enumerate(prompts))).clone()
    decoded = stepper.step(*((i, p[-1:], len(p) - 1) for i, p in enumerate(prompts))).clone()
    for i, prompt in enumerate(prompts):
        assert torch.equal(stepper.step((i, prompt[:-1], 0))[0], whole[i])
        assert torch.equal(stepper.step((i, prompt[-1:], len(prompt) - 1))[0], decoded[i])


def test_packed_weights_take_the_place_of_the_others(tiny: Tiny) -> None:
    for family in ("llama", "llama-tied"):
        plain = Stepper(tiny(family), dtype=torch.bfloat16).model.nbytes
        stepper = packed(tiny(family))
        assert stepper.model.packed is not None
        left = sum(t.nbytes for t in stepper.model.state_dict().values())
        assert stepper.model.nbytes == left + stepper.model.packed.nbytes
        table = VOCAB * 96 * 2
        assert left < (table if family == "llama" else 0) + 8 * 96 * 2
        # blocks of 16 outputs and of 32 inputs fill small weights up
        assert stepper.model.nbytes < 1.2 * plain + LENGTH * 32 * 4


def test_phases_are_timed_when_asked_for(tiny: Tiny) -> None:
    stepper = packed(tiny("llama"))
    inside = stepper.model.packed
    assert inside is not None
    assert inside.take_seconds() == {}
    stepper.step((0, random_prompts(20)[0], 0))
    taken = inside.take_seconds()
    assert tuple(taken) == PHASES
    assert all(seconds > 0 for seconds in taken.values())
    assert not any(inside.take_seconds().values())


def test_its_threads_share_the_draws_of_a_batch(tiny: Tiny) -> None:
    inside = packed(tiny("llama"), threads=3).model.packed
    assert inside is not None
    logits = torch.randn((9, 1000), generator=torch.Generator().manual_seed(1))
    tokens = []
    for threads in (None, inside.each_row):
        sampler = Sampler(1000, "cpu", 9)
        sampler.threads = threads
        for row in range(9):
            params = SamplingParams(seed=row, top_p=0.9)
            sampler.admit(row, params, np.zeros(1, np.int32), np.zeros(0, np.int32))
        batch = sampler.prepare(np.arange(9), np.arange(9))
        tokens.append(sampler.sample(logits.clone(), batch).tokens.tolist())
    assert tokens[0] == tokens[1]
    assert tokens[0] != logits.argmax(1).tolist()


def test_a_cpu_takes_it_for_whole_dense_models_of_bfloat16() -> None:
    needs = Needs(torch.bfloat16, 64)
    assert backend_names("auto", None, needs) == ("cpu",)
    for other in (
        Needs(torch.float32, 64),
        Needs(torch.float16, 64),
        Needs(torch.bfloat16, 72),
        Needs(torch.bfloat16, 64, whole=False),
    ):
        assert backend_names("auto", None, other) == ("torch",)
    with pytest.raises(UsageError, match="cpu computes in bfloat16; use --dtype bfloat16, or"):
        backend_names("cpu", None, Needs(torch.float32))
    with pytest.raises(UsageError, match="--attention-backend cpu computes on a CPU alone"):
        backend_names("cpu", (9, 0), needs)


GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("qwen3", {}),
        ("qwen3", {"max_prefill_tokens": 9, "page_size": 4}),
        (
            "qwen3",
            {"schedule": "mixed", "max_prefill_tokens": 9, "num_pages": 80, "reserve_tokens": 1},
        ),
        ("llama-tied", {"overlap_scheduling": False, "cache_type": "naive"}),
        # Attention alone, between operators of torch.
        ("qwen3-moe", {"attention_backend": "cpu"}),
        ("llama-9-3", {"attention_backend": "cpu", "tensor_parallel_size": 2}),
    ],
)
def test_the_engine_takes_the_most_likely_tokens(
    family: str, setting: dict[str, object], tiny: Tiny
) -> None:
    prompts = random_prompts(5, 40, 17, 40)
    with LLM(tiny(family), dtype="bfloat16", **setting) as llm:  # type: ignore[arg-type]
        assert ("kernels" in llm.start_report) == ("attention_backend" not in setting)
        outputs = [list(o.token_ids) for o in llm.generate(prompts, GREEDY)]
    texts = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    first = nearly = 0
    for prompt, output, logits in zip(
        prompts, outputs, reference_logits(tiny(family), texts), strict=True
    ):
        rows = logits[len(prompt) - 1 : -1]
        missed = rows.amax(1) - rows[torch.arange(len(output)), torch.tensor(output)]
        first += int((missed == 0).sum())
        nearly += int((missed < 0.2 * rows.std(1)).sum())
    count = sum(map(len, outputs))
    assert first > 0.8 * count
    assert nearly >= count - (2 if "moe" in family else 0)  # rounding may choose other experts


def test_without_a_compiler_torch_computes_and_one_debug_line_says_why(
    tiny: Tiny, tmp_path: Path
) -> None:
    program = (
        "import logging, sys; logging.basicConfig(level=logging.DEBUG)\n"
        "from minisgl import LLM, SamplingParams\n"
        f"with LLM({str(tiny('llama'))!r}, dtype='bfloat16') as llm:\n"
        "    assert 'kernels' not in llm.start_report\n"
        "    print(llm.generate([[5]], SamplingParams(max_tokens=2))[0].finish_reason)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
        env={**os.environ, DISABLE_ENV: "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("the CPU computes in torch operations: kernels are switched off") == 1


def test_what_the_kernels_cannot_do_is_refused_when_they_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ctx = AttentionContext(
        device=torch.device("cpu"), dtype=torch.bfloat16, num_qo_heads=2, num_kv_heads=1,
        head_dim=24, page_size=1, max_running=4, max_seq_len=128,
    )  # fmt: skip
    with pytest.raises(UsageError, match="needs heads of a multiple of 16 dimensions, not 24"):
        make_backend(("cpu",), ctx)
    monkeypatch.setattr(cpu_backend, "cpu_decoder_available", lambda: False)
    with pytest.raises(UsageError, match=r"needs a C\+\+ compiler .*; use torch"):
        make_backend(("cpu",), ctx)


def test_quantization_is_refused_where_torch_computes(tiny: Tiny) -> None:
    with pytest.raises(UsageError, match="--quantization int8 needs the CPU's own kernels"):
        LLM(tiny("llama"), dtype="float32", quantization="int8")


def test_a_killed_process_leaves_nothing_behind(tiny: Tiny) -> None:
    program = (
        "from minisgl import LLM, SamplingParams\n"
        f"llm = LLM({str(tiny('llama'))!r}, dtype='bfloat16')\n"
        "print('ready', flush=True)\n"
        "while True: llm.generate([[5] * 40], SamplingParams(max_tokens=50, ignore_eos=True))\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "3"},
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    assert child.wait(timeout=30) == -signal.SIGKILL
    assert child.stdout.read() == ""


def test_weights_of_another_type_stay_as_they_are(tiny: Tiny) -> None:
    stepper = Stepper(tiny("llama"))
    with pytest.raises(ValueError, match="bfloat16"):
        stepper.model.pack(LENGTH, 1)
    (prompt,) = random_prompts(10)
    assert torch.isfinite(stepper.step((0, prompt, 0))).all()
    assert load_model_config(tiny("llama")).dtype == "float32"


@pytest.mark.slow
def test_steps_touch_no_memory_that_is_not_theirs(tmp_path: Path) -> None:
    run_sanitized((Path(__file__).parent / "cpu_decoder_driver.cpp").read_text(), tmp_path)
