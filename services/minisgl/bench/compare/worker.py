"""`python -m minisgl.bench.compare.worker WORK TASK`: one system in a process of its own.

Each cell of the grid is computed twice on other prompts: first with few output tokens, untimed.
All systems count alike. Prefill is over when every sequence has its first token; decoding is what
the next `output_tokens` steps take, each with one more token of every sequence.
"""

import dataclasses
import importlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from minisgl.bench.compare.contender import WARM_UP_TOKENS, Cell, Grid, Times

Prompts = list[list[int]]
Timer = Callable[[Prompts, int], Times]
"""Computes the prompts, and so many output tokens after the first one of each."""
EXTRA_TOKENS = 2
"""What the engine generates beyond a cell's output tokens; see `own`."""
LLAMA_BATCH = 2048
"""Tokens of one call, as in `llama-batched-bench`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a worker is asked for, in its command line as JSON."""

    model: str
    """A folder; for llama.cpp a GGUF file."""
    grid: Grid
    vocab_size: int
    threads: int
    seed: int = 0
    dtype: str = "bfloat16"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of `minisgl.LLM`."""

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> "Task":
        """Of JSON."""
        fields = json.loads(text)
        grid = fields.pop("grid")
        batches, contexts = tuple(grid["batches"]), tuple(grid["contexts"])
        return cls(grid=Grid(batches, contexts, grid["output_tokens"]), **fields)

    def prompts(self, cell: Cell) -> Iterator[Prompts]:
        """Random ids, others each time, the same for all systems."""
        random, ids = Random(f"{self.seed} {cell}"), range(self.vocab_size)
        while True:
            yield [random.choices(ids, k=cell.prompt_tokens) for _ in range(cell.batch)]


def print_times(task: Task, timer: Timer) -> None:
    """A line for each cell."""
    tokens = task.grid.output_tokens
    for cell in task.grid.cells:
        prompts = task.prompts(cell)
        timer(next(prompts), min(WARM_UP_TOKENS, tokens))
        times = timer(next(prompts), tokens)
        line = {"prefill_seconds": times.prefill, "decode_seconds": times.decode}
        print(json.dumps(dataclasses.asdict(cell) | line), flush=True)


def own(task: Task) -> None:
    """The engine through `minisgl.LLM`, as users call it: scheduling and sampling count."""
    from minisgl.llm import LLM
    from minisgl.messages import SamplingParams

    with LLM(task.model, **task.options) as llm:

        def timer(prompts: Prompts, output_tokens: int) -> Times:
            def greedy(tokens: int) -> SamplingParams:
                return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

            began = time.perf_counter()
            llm.generate(prompts, greedy(1))
            prefill = time.perf_counter() - began
            # Again, with the prompts from the prefix cache, and with a token more than counts: in
            # the last step requests end.
            count = Marks(len(prompts), output_tokens)
            llm.on_step = lambda step: count.add(step.tokens, time.perf_counter())
            llm.generate(prompts, greedy(output_tokens + EXTRA_TOKENS))
            llm.on_step = None
            return Times(prefill, count.seconds)

        print_times(task, timer)


def phases(task: Task) -> None:
    """Where the engine's time goes, by the phases of its CPU kernels: for each cell seconds of the
    prefill and of a decode step, with the rest of what `generate` took. Prints nothing where torch
    computes."""
    from minisgl.llm import LLM
    from minisgl.messages import SamplingParams

    with LLM(task.model, **task.options) as llm:

        def seconds(prompts: Prompts, tokens: int) -> dict[str, float]:
            sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            llm.take_phases()
            began = time.perf_counter()
            llm.generate(prompts, sampling)
            whole = time.perf_counter() - began
            found = llm.take_phases()
            found["rest"] = whole - sum(found.values())
            return {name: value / tokens for name, value in found.items()}

        for cell in task.grid.cells:
            prompts = task.prompts(cell)
            seconds(next(prompts), WARM_UP_TOKENS)
            counted = next(prompts)
            # Decoding comes with the prompts in the prefix cache: their step is like any other.
            for phase, tokens in (("prefill", 1), ("decode", task.grid.output_tokens)):
                found = seconds(counted, tokens)
                if len(found) > 1:
                    line = {"phase": phase, "seconds": found}
                    print(json.dumps(dataclasses.asdict(cell) | line), flush=True)


@dataclass(slots=True)
class Marks:
    """When all sequences had their first token, and when `output_tokens` more."""

    batch: int
    output_tokens: int
    seen: int = 0
    first: float | None = None
    last: float | None = None

    def add(self, tokens: int, now: float) -> None:
        """So many tokens more at this time."""
        self.seen += tokens
        if self.first is None and self.seen >= self.batch:
            self.first = now
        if self.last is None and self.seen >= self.batch * (self.output_tokens + 1):
            self.last = now

    @property
    def seconds(self) -> float:
        """Between the two."""
        assert self.first is not None and self.last is not None
        return self.last - self.first


def transformers(task: Task) -> None:
    """`generate` of transformers: one batch of equal prompts, greedy, with its KV cache."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    class Stamps(StoppingCriteria):
        """Never stops; notes when each token is there."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            self.times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    torch.set_num_threads(task.threads)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=getattr(torch, task.dtype))
    model.generation_config.eos_token_id = None  # every output has its whole length

    def timer(prompts: Prompts, output_tokens: int) -> Times:
        stamps, ids = Stamps(), torch.tensor(prompts)
        began = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=output_tokens + 1,
            do_sample=False, use_cache=True, pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([stamps]),
        )  # fmt: skip
        if len(stamps.times) != output_tokens + 1:
            raise RuntimeError(f"{len(stamps.times)} tokens rather than {output_tokens + 1}")
        return Times(stamps.times[0] - began, stamps.times[-1] - stamps.times[0])

    print_times(task, timer)


def llama(task: Task) -> None:
    """llama.cpp by the batch API of llama-cpp-python: what `llama-batched-bench` does, which
    neither samples nor reads the scores."""
    lib: Any = importlib.import_module("llama_cpp")
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(task.model.encode(), lib.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp does not load {task.model}")
    most = max(task.grid.batches)
    params = lib.llama_context_default_params()
    params.n_seq_max, params.n_ctx = most, llama_context(task.grid)
    params.n_batch = LLAMA_BATCH
    params.n_threads = params.n_threads_batch = task.threads
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp makes no context of {params.n_ctx} tokens")
    features = re.findall(r"(\w+) = 1", lib.llama_print_system_info().decode())
    print(json.dumps({"features": features}), flush=True)

    def compute(batch: Any) -> None:
        if (code := lib.llama_decode(context, batch)) != 0:
            raise RuntimeError(f"llama_decode failed with code {code}")

    def batch_of(tokens: Sequence[tuple[int, int, int, bool]]) -> Any:
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, wanted
        return batch

    def timer(prompts: Prompts, output_tokens: int) -> Times:
        length = len(prompts[0])
        flat = [
            (token, position, i, position == length - 1)
            for i, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        parts = [batch_of(flat[i : i + LLAMA_BATCH]) for i in range(0, len(flat), LLAMA_BATCH)]
        step = batch_of([(prompt[0], 0, i, True) for i, prompt in enumerate(prompts)])
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        began = time.perf_counter()
        for part in parts:
            compute(part)
        lib.llama_synchronize(context)
        first = time.perf_counter()
        for position in range(length, length + output_tokens):
            for i, prompt in enumerate(prompts):
                step.token[i], step.pos[i] = prompt[position % length], position
            compute(step)
            lib.llama_synchronize(context)
        last = time.perf_counter()
        for batch in (*parts, step):
            lib.llama_batch_free(batch)
        return Times(first - began, last - first)

    print_times(task, timer)


def llama_context(grid: Grid) -> int:
    """Tokens of the KV cache that llama.cpp needs: it gives each sequence an equal part, in whole
    256 tokens."""
    return max(grid.batches) * -(-grid.longest // 256) * 256


def worker_command(work: str, task: Task) -> tuple[str, ...]:
    """The command line of a worker, with the interpreter that runs now."""
    # -P: a file torch.py in the user's folder must not be imported in place of the real one.
    return (sys.executable, "-P", "-m", "minisgl.bench.compare.worker", work, task.dumps())


WORK: dict[str, Callable[[Task], None]] = {
    "minisgl": own,
    "phases": phases,
    "transformers": transformers,
    "llama.cpp": llama,
}


if __name__ == "__main__":
    WORK[sys.argv[1]](Task.loads(sys.argv[2]))
