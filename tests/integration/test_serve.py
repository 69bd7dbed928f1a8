"""The real model behind the official client: what users of the service rely on."""

import concurrent.futures as cf
import contextlib
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from minisgl.bench.server import Server, choose_port
from tests.support import metrics, wait_until

pytestmark = [pytest.mark.model, pytest.mark.alone]

ASK: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "Name three rivers and say one sentence about each."}
]
FLAGS = ("--dtype", "float32", "--max-seq-len", "2048", "--num-pages", "20000")


@pytest.fixture(scope="module")
def server(real_model: Path) -> Iterator[Server]:
    with Server(str(real_model), [*FLAGS, "--max-queued-requests", "40"]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def _model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def _at_rest(server: Server) -> bool:
    m = metrics(server.url)
    unused = m["minisgl_kv_pages_free"] + m["minisgl_kv_pages_evictable"]
    return m["minisgl_requests_running"] == 0 and unused == m["minisgl_kv_pages_total"] > 0


def _wait(condition: Callable[[], bool], server: Server) -> None:
    wait_until(condition, 15, lambda: str(metrics(server.url)))


def test_a_stream_is_the_whole_answer_in_many_pieces(client: openai.OpenAI) -> None:
    model = _model(client)
    whole = client.chat.completions.create(model=model, messages=ASK, max_tokens=40, temperature=0)
    stream = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=40, temperature=0, stream=True
    )
    pieces = [c.choices[0].delta.content or "" for c in stream if c.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([p for p in pieces if p]) > 20
    assert whole.usage is not None and whole.usage.completion_tokens == 40


def test_the_answer_is_that_of_the_offline_engine(client: openai.OpenAI, real_model: Path) -> None:
    from minisgl import LLM, SamplingParams

    with LLM(real_model, dtype="float32", max_seq_len=2048, num_pages=4000) as llm:
        prompt = llm.tokenizer.encode_chat([{"role": "user", "content": "What is rain?"}])
        sampling = [
            SamplingParams(temperature=0.0, max_tokens=24),
            SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=24),
        ]
        offline = [o.text for o in llm.generate([prompt, prompt], sampling)]
    online = [
        client.chat.completions.create(
            model=_model(client),
            messages=[{"role": "user", "content": "What is rain?"}],
            max_tokens=24,
            temperature=params.temperature,
            top_p=params.top_p,
            seed=params.seed,
        ).choices[0].message.content
        for params in sampling
    ]  # fmt: skip
    assert online == offline


def test_a_client_that_leaves_frees_its_pages(client: openai.OpenAI, server: Server) -> None:
    stream = client.chat.completions.create(
        model=_model(client), messages=ASK, max_tokens=1500, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    chunks = iter(stream)
    for _ in range(5):
        next(chunks)
    _wait(lambda: metrics(server.url)["minisgl_requests_running"] == 1, server)
    stream.close()
    _wait(lambda: _at_rest(server), server)


def test_one_request_too_many_in_the_queue_is_answered_429(
    real_model: Path,
) -> None:
    flags = [*FLAGS, "--max-queued-requests", "2", "--max-running-requests", "1"]
    with Server(str(real_model), flags) as running, cf.ThreadPoolExecutor(8) as pool:
        body = {
            "model": str(real_model), "prompt": "one two", "max_tokens": 200, "ignore_eos": True,
        }  # fmt: skip

        def ask(_: int) -> httpx.Response:
            return httpx.post(f"{running.url}/v1/completions", json=body, timeout=120)

        answers = list(pool.map(ask, range(8)))
        refused = [a for a in answers if a.status_code == 429]
        assert refused and len(refused) < 8
        assert {a.status_code for a in answers} == {200, 429}
        assert all(a.json()["error"]["code"] == "queue_full" for a in refused)
        assert all(int(a.headers["retry-after"]) >= 1 for a in refused)


@contextlib.contextmanager
def _nginx(upstream: str, folder: Path) -> Iterator[str]:
    """nginx as a plain reverse proxy, with its defaults: it buffers answers unless told not to."""
    port = choose_port()
    config = folder / "nginx.conf"
    config.write_text(
        f"""
        daemon off; error_log {folder}/error.log; pid {folder}/pid; worker_processes 1;
        events {{ worker_connections 64; }}
        http {{
          access_log off;
          client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
          fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
          server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass {upstream}; }} }}
        }}
        """
    )
    process = subprocess.Popen(["nginx", "-c", str(config), "-p", str(folder)])
    try:

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_until(listens, 10, lambda: "nginx does not listen")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.nginx
def test_h46_tokens_come_one_by_one_through_nginx(
    client: openai.OpenAI, server: Server, tmp_path: Path
) -> None:
    body = {
        "model": _model(client), "messages": ASK, "max_tokens": 60, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    with (
        _nginx(server.url, tmp_path) as url,
        httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer,
    ):
        reads = list(answer.iter_raw())
    events = b"".join(reads).count(b"data: ")
    assert events > 40
    # nginx passes each flush of the gateway on; buffered, the answer is a few blocks of 4 KiB.
    assert len(reads) > 20, f"{events} events came in {len(reads)} pieces"


def test_an_answer_stays_whole_when_the_reader_is_slow(client: openai.OpenAI) -> None:
    arguments = {"model": _model(client), "messages": ASK, "max_tokens": 60, "temperature": 0}
    whole = client.chat.completions.create(**arguments)  # type: ignore[call-overload]
    stream = client.chat.completions.create(**arguments, stream=True)  # type: ignore[call-overload]
    pieces = []
    for i, chunk in enumerate(stream):
        if i % 20 == 0:
            metrics(str(client.base_url).removesuffix("/v1/"))  # something else meanwhile
        pieces += [chunk.choices[0].delta.content or ""] if chunk.choices else []
    assert "".join(pieces) == whole.choices[0].message.content
