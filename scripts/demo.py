#!/usr/bin/env python3
"""Serve a model on this machine, ask it one question as any OpenAI client would, and stop it."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

import httpx
import openai
from get_model import get_model

QUESTION = "Name three rivers of Europe and say one sentence about each."
START_SECONDS = 1800.0  # a hub model may have to be downloaded first
STOP_SECONDS = 30.0


def choose_port(preferred: int) -> int:
    """`preferred`, or a free port if something listens there."""
    with socket.socket() as probe:
        # As the server does: a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(server: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> bool:
    """Whether the server answers /ready with 200; False once it has ended or time is up.

    Shows the server's log meanwhile: its progress bars, or why it does not start.
    """
    limit = time.monotonic() + START_SECONDS
    shown = 0
    while True:
        ended = server.poll() is not None
        # pread: the server writes at the file offset that it shares with this process.
        text = os.pread(log.fileno(), 1 << 20, shown)
        shown += len(text)
        sys.stderr.buffer.write(text)
        sys.stderr.flush()
        if ended or time.monotonic() > limit:
            return False
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.2)


def ask(url: str, question: str, max_tokens: int) -> None:
    """Ask, print the answer as it comes, then its speed."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
    model = client.models.list().data[0].id
    print(f"\nQ: {question}\nA: ", end="", flush=True)
    start = time.monotonic()
    first = end = start
    tokens = 0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            if first == start:
                first = time.monotonic()
            end = time.monotonic()
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
    rate = (tokens - 1) / (end - first) if tokens > 1 and end > first else 0.0
    print(
        f"\n\n{tokens} tokens, first after {first - start:.2f} s, then {rate:.1f} tokens per second"
    )


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server as Ctrl-C does; by force if that takes too long."""
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", help="a Hugging Face id or a folder; none: SmolLM2-135M-Instruct"
    )
    parser.add_argument("--question", default=QUESTION, help="what to ask")
    parser.add_argument("--max-tokens", type=int, default=160, help="longest answer, in tokens")
    parser.add_argument("--port", type=int, default=1919, help="port to serve on, if it is free")
    args = parser.parse_args()

    try:
        model = args.model or os.path.relpath(get_model())
    except subprocess.CalledProcessError as error:
        print(f"demo: `{' '.join(error.cmd[2:5])} ...` failed: see above", file=sys.stderr)
        return 1
    port = choose_port(args.port)
    url = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).with_name("minisgl")), "serve", model, "--port", str(port)]
    print(f"Starting: minisgl {' '.join(command[1:])}", flush=True)
    with tempfile.TemporaryFile() as log:
        # Its own session: a Ctrl-C here reaches only this program, which then stops the server.
        server = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if not wait_until_ready(server, url, log):
                print("demo: the server did not start: see above", file=sys.stderr)
                return 1
            ask(url, args.question, args.max_tokens)
        except openai.OpenAIError as error:
            print(f"\ndemo: the request failed: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            stop(server)
    return 0


if __name__ == "__main__":
    sys.exit(main())
