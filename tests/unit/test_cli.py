"""The command line: what is accepted, what is refused and how, and what it hands on."""

import dataclasses
import fcntl
import http.server
import io
import json
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from minisgl.cli import sampling, services
from minisgl.cli.flags import Parser, add_flags, from_args
from minisgl.cli.main import COMMANDS, main
from minisgl.config import EngineConfig, GatewayConfig, StartError, UsageError, WorkerConfig, flag
from minisgl.launch.serve import LocalGatewayConfig, ServeConfig, as_arguments, serve_children
from minisgl.lifecycle import PARENT_FD_ENV, report_errors
from minisgl.logs import LogFormatter
from minisgl.messages import SamplingParams

SERVICES = ["gateway", "tokenizer", "detokenizer", "engine"]
ALL_SERVICES = "--bus --service --model --pod --heartbeat-timeout-seconds --drain-seconds"
ENGINE = (
    "--dtype --tensor-parallel-size --max-running-requests --max-seq-len --max-prefill-tokens "
    "--page-size --num-pages --memory-ratio --cache-type --attention-backend --cuda-graph-max-bs "
    "--disable-overlap-scheduling --disable-pynccl --load-format --schedule --seed --device "
    "--quantization --fake-engine"
)
GATEWAY = (
    "--host --port --api-keys-file --served-model-name --root-path --max-queued-requests "
    "--max-body-bytes "
    "--request-timeout-seconds --max-attempts --replay-wait-seconds --api-key"
)
CONTRACT = {
    "serve": f"{ENGINE} {GATEWAY} --num-tokenizers --startup-timeout-seconds",
    "chat": f"{ENGINE} --base-url --num-tokenizers",
    "generate": f"{ENGINE} --temperature --max-tokens --top-p --top-k --chat",
    "gateway": f"{ALL_SERVICES} {GATEWAY} --id --bus-password-file --bus-ca-file",
    "tokenizer": f"{ALL_SERVICES} --id --bus-password-file --bus-ca-file",
    "detokenizer": f"{ALL_SERVICES} --id --bus-password-file --bus-ca-file",
    "engine": f"{ALL_SERVICES} {ENGINE} --group --tp-rank --pod-index --ranks-per-pod --revision "
    "--interface --port-range --bus-password-file --bus-ca-file",
}


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    # Commands set up logs and signals for their whole process, which here is the tests'.
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    sigterm = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, sigterm)
    root.handlers[:], root.level = handlers, level


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 2) -> str:
    """The one line with which these arguments are refused."""
    assert main(argv) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


ENGINE_OF_TWO = ["engine", "--bus=ipc:///d", "--model=m", "--tensor-parallel-size=2"]

# --- help and contract


@pytest.mark.parametrize("command", CONTRACT)
def test_every_flag_of_the_contract_exists(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(command, capsys)
    assert [f for f in CONTRACT[command].split() if not re.search(rf"^  {f}\b", text, re.M)] == []


@pytest.mark.parametrize("command", CONTRACT)
def test_the_help_of_every_optional_flag_states_its_default(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = re.split(r"^  (?=-)|^\S.*:$", help_of(command, capsys), flags=re.M)
    needed = {"--bus", "--model", "--tp-rank", "--pod-index"}
    for entry in entries:
        if entry.startswith("--") and entry.split()[0] not in needed | {"--help"}:
            assert "(default" in entry, entry


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom minisgl.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'fastapi', 'numpy', 'transformers', 'zmq', 'httpx', 'prompt_toolkit'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.endswith("heavy: []\n")
    assert all(f"  {name}" in out.stdout for name in COMMANDS)


def test_python_dash_m_is_the_same_program() -> None:
    command = [sys.executable, "-m", "minisgl", "--version"]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert out.stdout.startswith("minisgl 0.")


# --- wrong arguments


@pytest.mark.parametrize("argv, words", [
    ([], "a command is missing"),
    (["serv"], "did you mean serve?"),
    ([""], "a command is missing"),
    (["--verbose"], "unknown flag --verbose"),
    (["serve"], "MODEL"),
    (["serve", "m", "extra"], "unexpected argument 'extra'"),
    (["serve", "m", "--page-siz", "4"], "did you mean --page-size?"),
    (["serve", "m", "--tensor", "2"], "unknown flag --tensor"),
    (["serve", "m", "--page-size", "four"], "--page-size: must be a whole number, not 'four'"),
    (["serve", "m", "--page-size", "0"], "--page-size must be at least 1, not 0"),
    (["bench", "serve", "--url=http://x", "--plot=p.txt"], "--plot: 'p.txt' must end in .png"),
    (["serve", "m", "--memory-ratio", "nan"], "--memory-ratio: must be a number, not 'nan'"),
    (["serve", "m", "--memory-ratio", "1.5"], "--memory-ratio"),
    (["serve", "m", "--dtype", "float8"], "--dtype"),
    (["serve", "m", "--port", "65536"], "--port must be between 0 and 65535"),
    (["serve", "m", "--max-attempts", "0"], "--max-attempts must be at least 1"),
    (["serve", "m", "--num-tokenizers", "-1"], "--num-tokenizers must be 0 or more"),
    (["serve", "m", "--startup-timeout-seconds", "0"], "--startup-timeout-seconds"),
    (["serve", "m", "--drain-seconds", "-1"], "--drain-seconds"),
    (["serve", "m", "--api-key", ""], "--api-key: must not be empty"),
    (["serve", "m", "--overlap-scheduling"], "did you mean --disable-overlap-scheduling?"),
    (["gateway", "--model", "m"], "--bus"),
    (ENGINE_OF_TWO, "--tp-rank R, or --pod-index I"),
    ([*ENGINE_OF_TWO, "--tp-rank=0", "--port-range=5"], "--port-range must be A-B"),
    (["bench"], "a command is missing"),
    (["bench", "onlne"], "did you mean offline?"),
    (["chat"], "--base-url"),
    (["chat", "--base-url", "localhost:1919"], "--base-url must start with http"),
    (["convert", "/no/such.gguf", "out"], "/no/such.gguf"),
    (["compile", "--model", "/no/such/folder"], "/no/such/folder"),
    (["serve", "/no/such/folder", "--port", "0"], "/no/such/folder"),
    (["generate", "m", "p", "--temperature", "3"], "--temperature must be between 0 and 2"),
    (["generate", "/no/such/folder", "p"], "/no/such/folder"),
    (["bench", "offline", "--json", "/no/such/folder/x"], "'/no/such/folder/x' cannot be written"),
    (["bench", "serve", "--url=http://x", "--plot=/no/x.png"], "'/no/x.png' cannot be written"),
])  # fmt: skip
def test_wrong_arguments_end_with_2_and_one_line_that_names_them(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, *argv)


@pytest.mark.parametrize("argv, words", [
    (["--tp-rank", "2"], "ranks are 0 to 1"),
    (["--tp-rank", "-1"], "ranks are 0 to 1"),
    (["--tp-rank", "0", "--pod-index", "0"], "either"),
    (["--tp-rank", "0", "--ranks-per-pod", "2"], "--ranks-per-pod goes with --pod-index"),
    (["--pod-index", "1", "--ranks-per-pod", "2"], "asks for rank 3"),
    (["--pod-index", "0", "--ranks-per-pod", "0"], "--ranks-per-pod must be at least 1"),
])  # fmt: skip
def test_ranks_that_the_group_does_not_have_are_refused(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, *ENGINE_OF_TWO, *argv)


def test_a_rank_that_is_alone_need_not_be_numbered() -> None:
    parser = Parser(prog="minisgl engine")
    services.add_engine(parser)
    args = parser.parse_args(["--bus=ipc:///d", "--model=m"])
    assert list(services._ranks(args, 1)) == [0]
    with pytest.raises(UsageError, match="--tensor-parallel-size is 2"):
        services._ranks(args, 2)


@pytest.mark.parametrize("value", ["x", "-1", "987654", "99999999999999999999"])
def test_a_malformed_variable_of_the_launcher_is_not_ignored(
    value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PARENT_FD_ENV, value)
    assert PARENT_FD_ENV in refused(capsys, "serve", "m")


# --- flags and dataclasses


@dataclasses.dataclass(frozen=True)
class Sample:
    name: str = flag("x", "100% text")
    count: int | None = flag(None, "how many")
    share: float = flag(0.5, "share")
    careful: bool = flag(True, "be careful")
    eager: bool = flag(False, "be eager")
    kind: str = flag("a", "kind", choices=("a", "b"))
    hidden: int = 3


def parsed(*argv: str) -> Sample:
    parser = Parser(prog="sample")
    add_flags(parser, Sample, "all")
    return from_args(Sample, parser.parse_args(argv))


def test_without_flags_the_dataclass_decides() -> None:
    assert parsed() == Sample()


def test_flags_become_fields_of_their_type() -> None:
    given = parsed(
        "--name=--y", "--count", "-3", "--share", "1e-3", "--disable-careful", "--eager", "--kind=b"
    )
    assert given == Sample("--y", -3, 0.001, False, True, "b")


def test_a_field_without_help_is_no_flag() -> None:
    with pytest.raises(UsageError, match="--hidden"):
        parsed("--hidden", "1")


@pytest.mark.parametrize("sample", [
    Sample(),
    Sample("a b\n'\"=-", -1, 1e300, False, True, "b"),
    Sample("", 0, 0.0),
])  # fmt: skip
def test_as_arguments_gives_the_command_line_that_makes_the_same(sample: Sample) -> None:
    assert parsed(*as_arguments(sample)) == sample


def test_an_unchanged_config_needs_no_arguments() -> None:
    assert as_arguments(EngineConfig(model="m")) == []


def test_the_defaults_that_sampling_flags_state_are_those_of_sampling_params() -> None:
    fields = {f.name: f.default for f in msgspec.structs.fields(SamplingParams)}
    stated = {name: default for name, (_, default, _) in sampling.FLAGS.items()}
    assert stated == {name: fields[name] for name in stated}


# --- what the launcher starts


def children(num_tokenizers: int = 0, **engine: Any) -> dict[str, list[str]]:
    specs = serve_children(
        "ipc:///run/x",
        "/models/m",
        EngineConfig(model="org/m", **engine),
        GatewayConfig(bus="", model="org/m", api_keys=("-k", "l"), max_attempts=5, drain_seconds=7),
        num_tokenizers=num_tokenizers,
        http_fd=9,
        log_flags=["--log-format=json"],
    )
    assert [s.name for s in specs if not s.waited] == [
        f"rank {r}" for r in range(1, engine.get("tensor_parallel_size", 1))
    ]
    assert [s.name for s in specs if s.stage == 0] == ["gateway"]
    return {s.name: list(s.command[s.command.index("minisgl") + 1 :]) for s in specs}


ADD = {
    "gateway": services.add_gateway,
    "tokenizer": services.add_tokenizer,
    "detokenizer": services.add_detokenizer,
    "engine": services.add_engine,
}


def read(command: list[str]) -> Any:
    parser = Parser(prog=command[0])
    ADD[command[0]](parser)
    return parser.parse_args(command[1:])


def test_the_children_of_the_launcher_read_back_what_it_was_given() -> None:
    made = children(2, tensor_parallel_size=2, page_size=4, overlap_scheduling=False)
    assert list(made) == [
        "rank 0", "rank 1", "detokenizer", "tokenizer 0", "tokenizer 1", "gateway",
    ]  # fmt: skip
    args = read(made["rank 1"])
    engine = from_args(EngineConfig, args)
    assert (args.tp_rank, args.bus) == (1, "ipc:///run/x")
    assert engine == EngineConfig(
        model="/models/m", tensor_parallel_size=2, page_size=4, overlap_scheduling=False
    )
    args = read(made["gateway"])
    gateway = from_args(GatewayConfig, args, api_keys=tuple(args.api_keys))
    assert gateway == GatewayConfig(
        bus="ipc:///run/x",
        model="/models/m",
        api_keys=("-k", "l"),
        served_model_name="org/m",
        max_attempts=5,
        drain_seconds=7,
    )
    assert (args.http_fd, args.listen_when_ready, args.log_format) == (9, True, "json")
    worker = from_args(WorkerConfig, read(made["tokenizer 1"]))
    assert worker == WorkerConfig(bus="ipc:///run/x", id="1", model="/models/m", drain_seconds=7)


@pytest.mark.parametrize("number, also", [(0, True), (1, False)])
def test_the_detokenizer_tokenizes_only_where_there_is_no_tokenizer(
    number: int, also: bool
) -> None:
    made = children(number)
    assert read(made["detokenizer"]).also_tokenize is also
    assert sum(name.startswith("tokenizer") for name in made) == number


def test_serve_takes_its_port_before_it_looks_for_the_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as taken:
        port = str(taken.server_address[1])
        line = refused(capsys, "serve", "/no/such/folder", "--port", port, code=1)
    assert f"port {port}" in line and "--port" in line


def test_serve_config_has_the_documented_defaults() -> None:
    assert ServeConfig() == ServeConfig(num_tokenizers=0, startup_timeout_seconds=1800)


# --- errors and logs


@pytest.mark.parametrize("error, code", [
    (UsageError("a\nb"), 2), (StartError("a b"), 1), (KeyboardInterrupt(), 130),
    (RuntimeError("a b"), 1),
])  # fmt: skip
def test_errors_become_exit_codes(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert report_errors("x", fail) == code
    text = capsys.readouterr().err
    assert ("Traceback" in text) == isinstance(error, RuntimeError)
    assert code == 130 or text.splitlines()[-1].endswith("a b")


def logged(form: str, message: str, **extra: object) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogFormatter(form, "rank-0"))
    logger = logging.Logger("minisgl.test")
    logger.addHandler(handler)
    try:
        raise ValueError("inner\nline")
    except ValueError:
        logger.exception(message, extra=extra)
    return stream.getvalue()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_record_is_one_line_with_its_fields(form: str) -> None:
    line = logged(
        form, 'two\nlines "quoted"\x1b[31m', uid=b"\x01\xff", group="g0", color_message="c"
    )
    assert line.count("\n") == 1 and "\x1b" not in line and "color" not in line
    if form == "json":
        fields = json.loads(line)
        assert (fields["group"], fields["level"], fields["process"]) == ("g0", "error", "rank-0")
        assert fields["msg"].startswith("two\nlines")
        assert "inner" in fields["exception"]
    else:
        assert "uid=01ff group=g0" in line and r"two\nlines" in line


def test_the_http_servers_own_records_have_the_projects_name() -> None:
    record = logging.makeLogRecord({"name": "uvicorn.error", "msg": "Invalid HTTP request"})
    line = LogFormatter("text", "gateway").format(record)
    assert "logger=minisgl.gateway.http" in line and "uvicorn" not in line


# --- chat


class FakeServer(http.server.BaseHTTPRequestHandler):
    """Answers each conversation with the contents of its messages; /fail is an error."""

    asked: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[list[str | None]] = []
    broken_off: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        self._reply(200, b'{"data": [{"id": "fake"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        self.keys.append(self.headers["authorization"])
        question = body["messages"][-1]["content"]
        if question == "/fail":
            return self._reply(429, b'{"error": {"message": "queue is full"}}')
        if question == "/garbage":
            return self._reply(500, b"<html>")
        if question == "/slow":
            return self._never_end()
        said = [m["content"] for m in body["messages"]]
        events = [{"choices": [{"delta": {"role": "assistant"}}]}, {"choices": []}]
        events += [{"choices": [{"delta": {"content": c}}]} for c in f"<{'|'.join(said)}>\x1b"]
        if question == "/late":
            events = [{"error": {"message": "lost"}}]
        text = ": ping\n\n" + "".join(f"data: {json.dumps(e)}\n\n" for e in events)
        return self._reply(200, (text + "data: [DONE]\n\n").encode())

    def _never_end(self) -> None:
        self.send_response(200)
        self.end_headers()
        piece = {"choices": [{"delta": {"content": "slow."}}]}
        try:
            while not self.server.closing.wait(0.02):  # type: ignore[attr-defined]
                self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
        except OSError:
            self.broken_off.set()

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def chat_server() -> Iterator[str]:
    FakeServer.asked.clear()
    FakeServer.keys.clear()
    FakeServer.broken_off.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeServer) as server:
        server.closing = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.closing.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()


def chat(url: str, text: bytes, *flags: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "minisgl", "chat", "--base-url", url, *flags]
    clean = {k: v for k, v in os.environ.items() if k != "OPENAI_API_KEY"}
    return subprocess.run(
        command,
        input=text,
        capture_output=True,
        timeout=60,
        env=clean | {"LC_ALL": "C.UTF-8"} | env,
    )


def test_a_piped_chat_keeps_history_until_reset_and_ends_at_exit(chat_server: str) -> None:
    done = chat(chat_server, "hi\n\n größe 🚀\n/reset\nagain\n/exit\nnever\n".encode())
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().splitlines() == [
        "<hi>",
        "<hi|<hi>\x1b|größe 🚀>".replace("\x1b", ""),
        "<again>",
    ]
    assert len(FakeServer.asked) == 3


def test_chat_sends_the_system_message_the_key_and_the_given_sampling_only(
    chat_server: str,
) -> None:
    flags = ["--system", "be kind", "--temperature", "0", "--stop", "x", "--api-key", "k"]
    assert (
        chat(chat_server + "/v1/", b"hi\n/reset\nho", *flags).stdout
        == b"<be kind|hi>\n<be kind|ho>\n"
    )
    assert FakeServer.keys == ["Bearer k", "Bearer k"]
    body = FakeServer.asked[0]
    assert {k: body[k] for k in body if k != "messages"} == {
        "model": "fake", "stream": True, "temperature": 0.0, "stop": ["x"],
    }  # fmt: skip


@pytest.mark.parametrize("question, words", [
    ("/fail", b"queue is full"), ("/garbage", b"HTTP status 500"), ("/late", b"lost"),
])  # fmt: skip
def test_a_question_without_an_answer_is_forgotten_and_reported(
    chat_server: str, question: str, words: bytes
) -> None:
    done = chat(chat_server, f"{question}\n".encode())
    assert done.returncode == 1 and words in done.stderr and b"Traceback" not in done.stderr
    done = chat(chat_server, f"{question}\nhi\n".encode())
    assert done.returncode == 0 and done.stdout == b"\n<hi>\n"


def test_bytes_that_are_no_text_do_not_end_a_chat(chat_server: str) -> None:
    done = chat(chat_server, b"\xff\xfe\nhi\n/exit\n")
    assert done.returncode == 0, done.stderr
    assert len(FakeServer.asked) == 2


def test_chat_with_a_server_that_is_away_is_one_line(tmp_path: Path) -> None:
    done = chat("http://127.0.0.1:9", b"hi\n")
    assert done.returncode == 1
    assert done.stderr.startswith(b"minisgl chat: no answer from") and done.stderr.count(b"\n") == 1


PROMPT = "\x1b[?2004h"  # prompt_toolkit asks for bracketed paste when it starts to read a line


class Terminal:
    """`minisgl chat` on a pseudo-terminal."""

    def __init__(self, url: str) -> None:
        self._fd, slave = pty.openpty()
        command = [sys.executable, "-m", "minisgl", "chat", "--base-url", url]
        env = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self._seen = ""

    def wait_for(self, text: str) -> None:
        while text not in self._seen:
            assert select.select([self._fd], [], [], 30)[0], f"no {text!r} in {self._seen!r}"
            self._seen += os.read(self._fd, 4096).decode(errors="replace")
        self._seen = self._seen.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def close(self) -> int:
        code = self.process.wait(30)
        os.close(self._fd)
        return code


def test_in_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_the_chat(chat_server: str) -> None:
    terminal = Terminal(chat_server)
    terminal.wait_for(PROMPT)
    terminal.type("/slow\r")
    terminal.wait_for("slow.slow.")
    terminal.type("\x03")
    terminal.wait_for(PROMPT)
    assert FakeServer.broken_off.wait(30)
    terminal.type("\x1b[200~two\nlines\x1b[201~")  # a paste; Enter then sends it as one
    terminal.wait_for("lines")
    terminal.type("\r")
    terminal.wait_for("|two")
    terminal.wait_for(PROMPT)
    terminal.type("/reset\r")
    terminal.wait_for("A new conversation.")
    terminal.wait_for(PROMPT)
    terminal.type("half\x03")  # Ctrl-C at the prompt drops the line
    terminal.wait_for(PROMPT)
    terminal.type("\x04")
    assert terminal.close() == 0
    slow, pasted = FakeServer.asked
    assert slow["messages"][-1]["content"] == "/slow"
    assert pasted["messages"][1]["content"].startswith("slow.slow.")
    assert pasted["messages"][-1]["content"] == "two\nlines"


def test_processes_of_one_machine_do_not_take_a_long_step_for_a_loss() -> None:
    specs = serve_children(
        "ipc:///run/x",
        "/models/m",
        EngineConfig(model="m"),
        LocalGatewayConfig(bus="", model="m"),
        num_tokenizers=0,
        http_fd=9,
    )
    for spec in specs:
        args = read(list(spec.command[spec.command.index("minisgl") + 1 :]))
        worker = from_args(WorkerConfig, args)
        assert (worker.heartbeat_timeout_seconds, worker.drain) == (600, 15), spec.name
