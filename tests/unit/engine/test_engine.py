"""The engine on tiny models: outputs against transformers, settings, and errors at its start."""

import json
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from minisgl import LLM, SamplingParams
from minisgl.config import EngineConfig, StartError, UsageError
from minisgl.distributed import PeerError, SingleRank
from minisgl.distributed.gloo import GlooCommunicator
from minisgl.engine.engine import Engine
from minisgl.engine.step import StepInput, StepOutput
from minisgl.scheduler import integrity
from tests.tiny import build_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny") / "llama", "llama", seed=3)


def _prompts() -> list[list[int]]:
    g = torch.Generator().manual_seed(5)
    sizes = (1, 4, 40, 23, 17, 40)
    return [torch.randint(4, 200, (n,), generator=g).tolist() for n in sizes]


@pytest.fixture(scope="module")
def reference(tiny: Path) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    outputs = []
    for prompt in _prompts():
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(12):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        outputs.append(ids[len(prompt) :])
    return outputs


SETTINGS: list[dict[str, Any]] = [
    {},
    {"page_size": 16},
    {"max_prefill_tokens": 5},
    {"overlap_scheduling": False},
    {"schedule": "mixed", "max_prefill_tokens": 9},
    {"cache_type": "naive"},
    {"max_running_requests": 2},
    {"num_pages": 70, "reserve_tokens": 2},
    {"tensor_parallel_size": 2},
    {"attention_backend": "torch,torch"},
]


RETRACTING: list[dict[str, Any]] = [
    {"schedule": "mixed", "max_prefill_tokens": 9, "num_pages": 60, "reserve_tokens": 1},
    {"schedule": "mixed", "num_pages": 60, "reserve_tokens": 1, "tensor_parallel_size": 2},
]
"""Mixed batches in so few pages that requests are taken back and computed again."""


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(s) or "default")
def test_greedy_output_is_that_of_transformers_in_every_setting(
    tiny: Path, reference: list[list[int]], setting: dict[str, Any]
) -> None:
    with LLM(tiny, dtype="float32", **setting) as llm:
        for _ in range(2):  # the second time from the cache
            outputs = llm.generate(_prompts(), GREEDY)
            assert [o.token_ids for o in outputs] == reference


@pytest.mark.parametrize("setting", RETRACTING, ids=lambda s: "-".join(s))
def test_mixed_batches_and_retraction_give_the_greedy_output_of_transformers(
    tiny: Path, reference: list[list[int]], setting: dict[str, Any]
) -> None:
    with LLM(tiny, dtype="float32", **setting) as llm:
        outputs = llm.generate(_prompts(), GREEDY)
        assert llm._scheduler.retractions > 0, "the setting is there to retract"
    assert [o.token_ids for o in outputs] == reference


def test_seeded_samples_do_not_depend_on_batch_chunks_ranks_or_loop(tiny: Path) -> None:
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, seed=i, max_tokens=10, ignore_eos=True)
        for i in range(6)
    ]
    results = []
    for setting in [*SETTINGS[:5], *SETTINGS[7:9], *RETRACTING]:
        with LLM(tiny, dtype="float32", **setting) as llm:
            results.append([o.token_ids for o in llm.generate(_prompts(), params)])
            alone = [
                llm.generate([p], s)[0].token_ids
                for p, s in zip(_prompts()[:2], params[:2], strict=True)
            ]
            assert alone == results[-1][:2]
    assert all(r == results[0] for r in results)
    assert results[0][2] != results[0][5], "another seed, another sample"


def test_penalties_survive_chunks_and_retraction(tiny: Path) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=20, ignore_eos=True, frequency_penalty=1.5,
        presence_penalty=0.5, repetition_penalty=1.3,
    )  # fmt: skip
    results = []
    for setting in ({}, {"max_prefill_tokens": 3}, {"num_pages": 80, "reserve_tokens": 1}):
        with LLM(tiny, dtype="float32", **setting) as llm:
            results.append([o.token_ids for o in llm.generate(_prompts(), params)])
            retracted = llm._scheduler.retractions
    assert retracted > 0, "the last setting is there to retract"
    assert results[0] == results[1] == results[2]


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, dtype="float32") as made:
        yield made


def test_generate_takes_one_text_and_gives_a_list(llm: LLM) -> None:
    outputs = llm.generate("abc", SamplingParams(max_tokens=3, temperature=0.0))
    assert len(outputs) == 1 and outputs[0].prompt_tokens == 3


def test_a_cpu_gives_each_token_with_the_step_that_computes_it(llm: LLM) -> None:
    steps: list[int] = []
    llm.on_step = lambda step: steps.append(step.tokens)
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
    llm.on_step = None
    assert steps == [1, 1, 1]


def test_a_stop_string_cuts_the_text_and_ends_the_output(llm: LLM) -> None:
    (whole,) = llm.generate("abc", GREEDY)
    at = len(whole.text) // 2
    stop = whole.text[at : at + 2]
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=stop)
    (cut,) = llm.generate("abc", sampling)
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish_reason == "stop"
    assert llm._scheduler.idle, "the cut request is still there"


def test_logprobs_are_those_of_the_model(llm: LLM, tiny: Path) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=3, logprobs=4, ignore_eos=True)
    (out,) = llm.generate([[10, 11, 12]], sampling)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    with torch.inference_mode():
        want = model(torch.tensor([[10, 11, 12]])).logits[0, -1].log_softmax(-1)
    assert out.logprobs is not None and len(out.logprobs) == 3
    first = out.logprobs[0]
    assert first.top_ids == want.topk(4).indices.tolist() and first.top_ids[0] == out.token_ids[0]
    assert first.top_logprobs == pytest.approx(want.topk(4).values.tolist(), abs=1e-4)
    assert first.logprob == pytest.approx(first.top_logprobs[0])


def test_a_prompt_that_cannot_be_computed_is_named_and_none_is_computed(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompt 1: the prompt has 9000 tokens"):
        llm.generate([[5, 6], [5] * 9000], GREEDY)
    with pytest.raises(ValueError, match="prompt 0: the prompt holds no token"):
        llm.generate([[]], GREEDY)
    with pytest.raises(ValueError, match="prompt 0: token ids must be between"):
        llm.generate([[10**9]], GREEDY)
    for wrong in ([5, 6], [[10**30]]):
        with pytest.raises(ValueError, match="prompt 0 must be a text or a list of token ids"):
            llm.generate(wrong, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 prompts and 1 sampling parameters"):
        llm.generate(["a", "b"], [GREEDY])
    assert llm._scheduler.idle


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interrupt_within_a_step_leaves_nothing_behind(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    steps, forward = 0, Engine.forward

    def interrupted(self: Engine, step: StepInput) -> StepOutput:
        nonlocal steps
        steps += 1
        if steps == 3:
            signal.raise_signal(signal.SIGINT)
        return forward(self, step)

    with LLM(tiny, dtype="float32", tensor_parallel_size=ranks) as made:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                made.generate(["abc", "xyz"], GREEDY)
        assert steps < 6, "the call went on after the interrupt"
        integrity.check(made._scheduler)
        assert made._scheduler.idle and made._scheduler.running == 0
        assert len(made.generate("abc", GREEDY)[0].token_ids) == 12


def test_after_a_step_that_failed_the_llm_says_so(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Engine, step: StepInput) -> StepOutput:
        raise RuntimeError("out of memory")

    with LLM(tiny, dtype="float32", tensor_parallel_size=2) as made:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "forward", failing)
            with pytest.raises(RuntimeError, match="out of memory"):
                made.generate("abc", GREEDY)
        with pytest.raises(RuntimeError, match="an earlier call failed within a step"):
            made.generate("abc", GREEDY)


def test_a_rank_that_is_lost_during_the_start_is_a_start_error(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*args: object, **options: object) -> None:
        raise PeerError("rank 0 lost a peer")

    monkeypatch.setattr("minisgl.llm.offline.make_engine", lost)
    with pytest.raises(StartError, match="a rank was lost before"):
        LLM(tiny)


def test_no_rank_loads_before_all_have_seen_their_free_memory(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Watched(SingleRank):
        def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
            events.append("exchange")
            return super().gather_ints(values)

    def measured() -> int:
        events.append("measure")
        return 2**33

    def loaded(*args: object) -> None:
        events.append("load")
        raise StartError("enough seen")

    monkeypatch.setattr("minisgl.engine.engine.free_memory", measured)
    monkeypatch.setattr("minisgl.engine.engine.load_weights", loaded)
    with pytest.raises(StartError, match="enough seen"):
        Engine(EngineConfig(model=str(tiny)), tiny, Watched())
    assert events == ["measure", "exchange", "load"]


@pytest.mark.parametrize(
    ("given", "threads"), [(None, 2), ("1", 1), ("3", 3), ("3,1", 3), ("", 2), ("many", 2)]
)
def test_a_rank_takes_the_cores_of_its_host_unless_told_otherwise(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, threads: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr("minisgl.host.usable_cpus", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as another engine of this process leaves it
    try:
        Engine(EngineConfig(model=str(tiny), num_pages=100), tiny, SingleRank())
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_all_ranks_take_the_pages_that_the_fullest_one_can_hold(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = threading.local()
    monkeypatch.setattr("minisgl.engine.engine.free_memory", lambda: mine.free)
    monkeypatch.setattr("minisgl.engine.engine.host_id", lambda: mine.host)
    config = EngineConfig(model=str(tiny), dtype="float32", max_prefill_tokens=64)

    def pages(rank: int, free: int, host: int, meet: str) -> int:
        mine.free, mine.host = free, host
        comm = GlooCommunicator(f"file://{tmp_path}/{meet}", rank, 2, 60, host="127.0.0.1")
        try:
            return Engine(config, tiny, comm).num_pages
        finally:
            comm.close()

    def of_both(free: tuple[int, int], hosts: tuple[int, int]) -> int:
        meet = f"{free}{hosts}"
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(pages, (0, 1), free, hosts, (meet, meet))
        assert first == second
        return first

    little = of_both((2**28, 2**28), (7, 7))
    much = of_both((2**29, 2**29), (7, 7))
    assert little < much, "memory and not the number of requests must decide here"
    assert of_both((2**29, 2**28), (7, 7)) == little
    assert of_both((2**28, 2**28), (7, 8)) == much, "ranks divide the memory of their own host"


def test_tables_that_no_machine_can_hold_name_the_flags(tiny: Path) -> None:
    with pytest.raises(StartError, match="tables; use a lower --max-running-requests"):
        LLM(tiny, num_pages=10, max_running_requests=2**45)


def test_two_models_live_in_one_process_at_the_same_time(tiny: Path, llm: LLM) -> None:
    with LLM(tiny, dtype="float32", tensor_parallel_size=2) as other:
        assert (
            other.generate("abc", GREEDY)[0].token_ids == llm.generate("abc", GREEDY)[0].token_ids
        )


def test_dummy_weights_need_only_a_config(tiny: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    outputs = []
    for size in (1, 2):
        with LLM(tmp_path, load_format="dummy", tensor_parallel_size=size) as made:
            outputs.append(made.generate([[5, 6, 7]], GREEDY)[0].token_ids)
    assert len(outputs[0]) == 12


def test_a_folder_with_a_config_alone_takes_prompts_of_ids_and_gives_no_text(
    tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    with LLM(tmp_path, load_format="dummy") as made:
        (out,) = made.generate([[5, 6, 7]], GREEDY)
        assert len(out.token_ids) == 12 and out.text == ""
        with pytest.raises(ValueError, match="holds no tokenizer: give prompts as lists"):
            made.generate("abc", GREEDY)
    with pytest.raises(StartError, match="holds no tokenizer"):
        LLM(tmp_path)


def test_a_closed_llm_computes_no_more(tiny: Path) -> None:
    made = LLM(tiny, dtype="float32")
    made.close()
    made.close()
    with pytest.raises(RuntimeError, match="this engine is closed"):
        made.generate("abc", GREEDY)


def test_a_missing_gpu_is_an_error_that_says_what_to_do(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartError, match="--device cuda cannot be used .* or use --device cpu"):
        LLM(tiny, device="cuda")


def test_an_unknown_option_is_a_type_error_that_lists_the_options(tiny: Path) -> None:
    with pytest.raises(TypeError, match=r"no option 'pagesize'.*page_size"):
        LLM(tiny, pagesize=4)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"page_size": "4"}, "--page-size must be of type int | None, not '4'"),
        ({"max_running_requests": 2.5}, "--max-running-requests must be of type int, not 2.5"),
        ({"memory_ratio": "0.5"}, "--memory-ratio must be of type float | None, not '0.5'"),
        ({"num_pages": 0}, "--num-pages must be at least 1, not 0"),
    ],
)
def test_an_option_of_the_wrong_type_or_size_is_named(
    tiny: Path, option: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        LLM(tiny, **option)


def test_a_missing_folder_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        LLM(tmp_path / "none")


def test_a_sequence_limit_above_the_model_is_a_usage_error(tiny: Path) -> None:
    with pytest.raises(UsageError, match="--max-seq-len 100000 is over the model's limit"):
        LLM(tiny, max_seq_len=100000)


def test_a_sequence_limit_without_room_for_an_output_names_the_flag(tiny: Path) -> None:
    with pytest.raises(UsageError, match="--max-seq-len must be at least 2 tokens"):
        LLM(tiny, max_seq_len=1)


def test_an_active_sliding_window_shorter_than_the_limit_names_the_flag(
    tmp_path: Path,
) -> None:
    folder = build_tiny(tmp_path / "mistral", "mistral", sliding_window=40)
    with pytest.raises(UsageError, match="--max-seq-len 40 or less"):
        LLM(folder)
    with LLM(folder, max_seq_len=40) as made:
        assert made.max_model_len == 40


def test_a_rank_that_cannot_load_ends_the_start_of_all(tiny: Path, tmp_path: Path) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(StartError, match=r"model\.safetensors"):
        LLM(tmp_path, tensor_parallel_size=2)


def test_heads_that_cannot_be_shared_name_field_and_ranks(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "odd", "llama", intermediate_size=99)
    with pytest.raises((UsageError, StartError), match=r"intermediate_size.*99.*2"):
        LLM(folder, tensor_parallel_size=2)


def test_generation_config_gives_more_end_tokens(tiny: Path, tmp_path: Path) -> None:
    (whole,) = _outputs(tiny)
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = {"eos_token_id": [2, whole[5]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    with LLM(tmp_path, dtype="float32") as made:
        sampling = SamplingParams(temperature=0.0, max_tokens=12)
        (out,) = made.generate([_prompts()[2]], sampling)
    assert out.token_ids == whole[: whole.index(whole[5]) + 1] and out.finish_reason == "stop"


def _outputs(folder: Path) -> list[list[int]]:
    with LLM(folder, dtype="float32") as made:
        return [o.token_ids for o in made.generate([_prompts()[2]], GREEDY)]
