"""The CUDA engine on tiny models: logits against float32, and tokens whatever the settings.

In bfloat16 the same sum in another order is another number, so settings are compared by how far
their outputs agree. In float32 with the torch operations nothing may differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from minisgl import LLM, SamplingParams
from minisgl.config import UsageError
from minisgl.engine.graph_sizes import prompt_sizes
from minisgl.engine.staging import Staging
from minisgl.llm import GenerationOutput
from minisgl.scheduler import integrity
from tests.tiny import build_tiny

OUTPUT = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
SIZES = (1, 4, 40, 23, 17, 40, 129, 64, 3, 200)
SHAPES = {
    "qwen3-64": ("qwen3", {"head_dim": 64, "hidden_size": 128}),
    "llama-128": (
        "llama",
        {"head_dim": 128, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2},
    ),
}
Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("models")
    return {
        name: build_tiny(root / name, family, seed=3, **changes)
        for name, (family, changes) in SHAPES.items()
    }


def prompts() -> list[list[int]]:
    g = torch.Generator().manual_seed(5)
    return [torch.randint(4, 200, (n,), generator=g).tolist() for n in SIZES]


def on_cuda(folder: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "device": "cuda", "dtype": "bfloat16", "num_pages": 4096, "max_running_requests": 16,
    }  # fmt: skip
    return LLM(folder, **(defaults | options))


def tokens(llm: LLM, params: SamplingParams | Sequence[SamplingParams] = GREEDY) -> list[list[int]]:
    outputs = [o.token_ids for o in llm.generate(prompts(), params)]
    integrity.check(llm._scheduler)
    return outputs


def agreement(one: list[list[int]], other: list[list[int]]) -> float:
    """Mean share of each output that is equal from its start."""
    shares = []
    for a, b in zip(one, other, strict=True):
        assert len(a) == len(b)
        same = np.array(a) == np.array(b)
        shares.append(float(np.cumprod(same).mean()))
    return float(np.mean(shares))


# --- logits --------------------------------------------------------------------------------------

WITH_LOGPROBS = SamplingParams(temperature=0.0, max_tokens=OUTPUT, logprobs=20, ignore_eos=True)


@dataclass
class Reference:
    """What float32 on a CPU gives for the prompts."""

    outputs: list[GenerationOutput]
    allowed: float
    """How far transformers in bfloat16 is from it, root mean square over log probabilities."""


@pytest.fixture(scope="module")
def references(folders: Folders) -> dict[str, Reference]:
    found = {}
    for shape, folder in folders.items():
        with LLM(folder, dtype="float32", device="cpu") as llm:
            outputs = llm.generate(prompts(), WITH_LOGPROBS)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        errors = []
        for prompt, out in zip(prompts(), outputs, strict=True):
            with torch.inference_mode():
                logits = model.eval()(torch.tensor([prompt + out.token_ids])).logits[0]
            near = logits.float().log_softmax(-1)[len(prompt) - 1 :]
            assert out.logprobs is not None
            for i, exact in enumerate(out.logprobs):
                errors.append(near[i, exact.top_ids] - torch.tensor(exact.top_logprobs))
        found[shape] = Reference(outputs, float(torch.cat(errors).square().mean().sqrt()))
    return found


def check_logits(llm: LLM, reference: Reference, what: str) -> None:
    """Log probabilities of the most likely tokens, up to where greedy outputs part, are as near to
    float32 as those of transformers in bfloat16."""
    outputs = llm.generate(prompts(), WITH_LOGPROBS)
    errors, equal = [], 0
    for out, exact in zip(outputs, reference.outputs, strict=True):
        assert out.logprobs is not None and exact.logprobs is not None
        for i, (seen, wanted) in enumerate(zip(out.logprobs, exact.logprobs, strict=True)):
            want = dict(zip(wanted.top_ids, wanted.top_logprobs, strict=True))
            pairs = zip(seen.top_ids, seen.top_logprobs, strict=True)
            errors += [value - want[token] for token, value in pairs if token in want]
            if out.token_ids[i] != exact.token_ids[i]:
                break
            equal += 1
    error = float(np.sqrt(np.mean(np.square(errors))))
    print(f"{what}: error {error:.4f} of {reference.allowed:.4f}, {equal} equal tokens")
    assert error < 1.3 * reference.allowed + 0.01
    assert equal > 0.4 * OUTPUT * len(SIZES)


@pytest.mark.parametrize("graphs", [None, 0], ids=["graphs", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_in_bfloat16_are_as_near_to_float32_as_those_of_transformers(
    folders: Folders, references: dict[str, Reference], shape: str, graphs: int | None
) -> None:
    with on_cuda(folders[shape], cuda_graph_max_bs=graphs) as llm:
        check_logits(llm, references[shape], shape)


def test_the_draw_of_the_kernel_is_that_of_torch_operations(folders: Folders) -> None:
    """Log probabilities make a batch take torch operations for its draw."""

    def with_seed(i: int, logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            temperature=0.8 * (i % 3), seed=i, max_tokens=OUTPUT, logprobs=logprobs, ignore_eos=True
        )  # fmt: skip

    with on_cuda(folders["qwen3-64"], cache_type="naive") as llm:
        kernel, torchs = (
            tokens(llm, [with_seed(i, logprobs) for i in range(len(SIZES))])
            for logprobs in (None, 0)
        )
    assert kernel == torchs


# --- settings ------------------------------------------------------------------------------------

MIXED = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, top_p=0.8, top_k=20, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=7, min_p=0.05, max_tokens=12, ignore_eos=True),
    SamplingParams(
        temperature=0.7, seed=6, max_tokens=12, frequency_penalty=1.2, presence_penalty=0.4,
        logit_bias={7: 3.0}, ignore_eos=True,
    ),
    SamplingParams(temperature=0.0, max_tokens=7, repetition_penalty=1.4, ignore_eos=True),
]  # fmt: skip
ALL_KINDS = [*MIXED, *MIXED[:4]]
LIMITED = [MIXED[i % 4] for i in range(len(SIZES))]
"""Draws and limits alone, which take no torch operations."""


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap_scheduling": False}, {"max_prefill_tokens": 33}, {"schedule": "mixed"}],
    ids=lambda o: "-".join(o) or "default",
)
def test_float32_gives_the_tokens_of_the_cpu_for_every_kind_of_sampling(
    folders: Folders, options: dict[str, Any]
) -> None:
    folder = folders["qwen3-64"]
    with LLM(folder, dtype="float32", device="cpu") as llm:
        expected = [tokens(llm, kinds) for kinds in (ALL_KINDS, LIMITED)]
    exact = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with on_cuda(folder, dtype="float32", attention_backend="torch", **options) as llm:
            for kinds, wanted in zip((ALL_KINDS, LIMITED), expected, strict=True):
                assert agreement(tokens(llm, kinds), wanted) > 0.98
    finally:
        torch.backends.cuda.matmul.allow_tf32 = exact


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap_scheduling": False},
        {"cuda_graph_max_bs": 0},
        {"cuda_graph_max_bs": 4},
        {"max_prefill_tokens": 33},
        {"cache_type": "naive"},
        {"schedule": "mixed", "max_prefill_tokens": 48},
        {"max_running_requests": 3},
        {"num_pages": 20, "page_size": 64, "reserve_tokens": 2},
    ],
    ids=lambda o: "-".join(o) or "default",
)
@pytest.mark.parametrize("shape", SHAPES)
def test_settings_agree(
    folders: Folders, references: dict[str, Reference], shape: str, options: dict[str, Any]
) -> None:
    with on_cuda(folders[shape], **options) as llm:
        for _ in range(2):  # the second time from the cache
            check_logits(llm, references[shape], f"{shape} {options}")
        tokens(llm)  # and the integrity of its pages


@pytest.mark.parametrize("page_size", [None, 16, 64, 256])
@pytest.mark.parametrize("backend", ["torch", "fi", "fa", "fa,fi", "mini", "fa,mini", "fi,mini"])
def test_backends_agree(
    folders: Folders, references: dict[str, Reference], backend: str, page_size: int | None
) -> None:
    for shape, folder in folders.items():
        try:
            llm = on_cuda(
                folder, attention_backend=backend, page_size=page_size,
                num_pages=4096 if page_size is None else 65536 // page_size,
            )  # fmt: skip
        except UsageError as error:
            pytest.skip(str(error))
        with llm:
            what = f"{shape} {backend} page {llm._scheduler.cache.page_size}"
            check_logits(llm, references[shape], what)


@pytest.fixture
def no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are compared bit by bit must not time their products: two trials may differ."""
    monkeypatch.setattr("minisgl.models.decoder.Decoder.trial", lambda *_: None)


def test_overlap_changes_no_token(folders: Folders, no_trial: None) -> None:
    results = []
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=OUTPUT, ignore_eos=True)
              for i in range(len(SIZES))]  # fmt: skip
    for overlap in (True, False):
        with on_cuda(folders["qwen3-64"], overlap_scheduling=overlap) as llm:
            results.append([tokens(llm, params), tokens(llm)])
    assert results[0] == results[1]


def test_no_array_is_overwritten_while_the_device_is_behind(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, no_trial: None
) -> None:
    """One block in pinned memory instead of three, and copies that start late."""
    sequential = {"overlap_scheduling": False, "num_pages": 4096}
    with on_cuda(folders["qwen3-64"], **sequential) as llm:
        expected = tokens(llm)
    send, start = Staging.send, Staging.__init__

    def late(self: Staging, size: int) -> None:
        torch.cuda._sleep(4_000_000)  # cycles: about 2 ms
        send(self, size)

    def with_one_block(self: Staging, size: int, device: torch.device) -> None:
        start(self, size, device, blocks=1)

    monkeypatch.setattr(Staging, "send", late)
    monkeypatch.setattr(Staging, "__init__", with_one_block)
    with on_cuda(folders["qwen3-64"], num_pages=4096) as llm:
        assert tokens(llm) == expected


def test_a_large_batch_gives_the_same_tokens_each_time(configs: Path, no_trial: None) -> None:
    """In two engines, of a model whose random weights let no error pass."""
    g = torch.Generator().manual_seed(2)
    load = [torch.randint(0, 151_000, (40 + 7 * i,), generator=g).tolist() for i in range(150)]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    options: dict[str, Any] = {"load_format": "dummy", "device": "cuda", "memory_ratio": 0.4}
    results = []
    for _ in range(2):
        with LLM(configs / "qwen3-0.6b", **options) as llm:
            results.append([o.token_ids for o in llm.generate(load, params)])
    assert results[0] == results[1]
    assert len({tuple(tokens) for tokens in results[0]}) > 100


def test_short_prompts_give_the_same_with_and_without_graphs_for_them(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other and a few at a time, in steps that the graphs hold; and some of them in
    chunks, behind what the cache has."""
    results, options = [], {"max_prefill_tokens": 128, "attention_backend": "fa,fi"}
    for sizes in (prompt_sizes, lambda limit: []):
        monkeypatch.setattr("minisgl.engine.graph_sizes.prompt_sizes", sizes)
        with on_cuda(folders["llama-128"], **options) as llm:
            found = [llm.generate([p], WITH_LOGPROBS)[0] for p in prompts()]
            found += llm.generate(prompts()[:5], WITH_LOGPROBS)
            assert llm.start_report["prompt_graphs"] == len(sizes(128))
        results.append([out.token_ids for out in found])
    assert agreement(*results) > 0.7


def test_a_seeded_sample_is_the_same_alone_and_in_a_batch(folders: Folders) -> None:
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=OUTPUT, ignore_eos=True)
              for i in range(len(SIZES))]  # fmt: skip
    options = {"dtype": "float32", "attention_backend": "torch"}
    with on_cuda(folders["llama-128"], **options) as llm:
        together = tokens(llm, params)
        alone = [llm.generate([p], s)[0].token_ids for p, s in zip(prompts(), params, strict=True)]
    assert agreement(together, alone) > 0.98


# --- start and memory ----------------------------------------------------------------------------


def test_dummy_weights_fill_the_device_and_every_admission_fits(configs: Path) -> None:
    """At --memory-ratio 0.95, more long prompts than run at once, with all kinds of sampling."""
    g = torch.Generator().manual_seed(1)
    load = [torch.randint(0, 151_000, (700 + 5 * i,), generator=g).tolist() for i in range(300)]
    kinds = [
        SamplingParams(temperature=0.6, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.9, top_k=50, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.9, max_tokens=12, presence_penalty=0.5, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=5, ignore_eos=True),
    ]
    folder = configs / "qwen3-0.6b"
    with LLM(folder, load_format="dummy", memory_ratio=0.95, device="cuda") as llm:
        report = llm.start_report
        outputs = llm.generate(load, [kinds[i % 4] for i in range(len(load))])
        free, total = torch.cuda.mem_get_info()
        print(report, f"free {free / 2**30:.2f} GiB")
        integrity.check(llm._scheduler)
    assert all(len(o.token_ids) == 12 for o in outputs)
    assert report["kv_bytes"] > 0.7 * total
    assert report["graphs"] == 35 and report["graph_bytes"] > 0


def test_two_models_after_each_other_find_the_same_memory(configs: Path) -> None:
    pages, free = [], []
    for _ in range(2):
        free.append(torch.cuda.mem_get_info()[0])
        with LLM(
            configs / "qwen3-0.6b", load_format="dummy", device="cuda", cuda_graph_max_bs=2,
            memory_ratio=0.5,
        ) as llm:  # fmt: skip
            pages.append(llm._scheduler.cache.num_pages)
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert free[1] > free[0] - 2**30
    assert abs(pages[0] - pages[1]) < 0.02 * pages[0]


def test_two_models_live_on_one_device(folders: Folders) -> None:
    with on_cuda(folders["qwen3-64"]) as one, on_cuda(folders["llama-128"]) as other:
        first, second = tokens(one), tokens(other)
        assert agreement(tokens(one), first) > 0.9
        assert agreement(tokens(other), second) > 0.9


def test_auto_takes_the_gpu(folders: Folders) -> None:
    with on_cuda(folders["qwen3-64"], device="auto") as llm:
        assert llm.start_report["device"] == torch.cuda.get_device_name()
