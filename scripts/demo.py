#!/usr/bin/env python3
"""Serve a model on this machine, ask it one question as any OpenAI client would, and stop it."""

import argparse
import os
import subprocess
import sys
import time

import openai
from get_model import get_model

from minisgl.bench.server import Server
from minisgl.config import StartError

QUESTION = "Name three rivers of Europe and say one sentence about each."
START_SECONDS = 1800.0  # a hub model may have to be downloaded first


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

    arguments: list[str] = []
    try:
        model = args.model
        if not model:
            model = os.path.relpath(get_model())
            # Its folder says float32, which has no kernels of its own and twice the bytes.
            arguments = ["--dtype", "bfloat16"]
    except subprocess.CalledProcessError as error:
        print(f"demo: `{' '.join(error.cmd[2:5])} ...` failed: see above", file=sys.stderr)
        return 1
    server = Server(
        model, arguments, port=args.port, start_seconds=START_SECONDS, echo=sys.stderr.buffer
    )
    print(f"Starting: minisgl {' '.join(server.command[3:])}", flush=True)
    try:
        with server:
            ask(server.url, args.question, args.max_tokens)
    except (StartError, openai.OpenAIError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
