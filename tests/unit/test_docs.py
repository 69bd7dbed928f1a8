"""What the pages say exists: links, commands, flags, fields, values, metrics and reasons."""

import ast
import itertools
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from minisgl.cli.flags import Commands, Parser
from minisgl.cli.main import COMMANDS
from minisgl.config import UsageError
from minisgl.gateway.metrics import Metrics as GatewayMetrics
from minisgl_operator.main import main as operator_main
from minisgl_operator.metrics import Metrics as OperatorMetrics
from minisgl_operator.status.conditions import TYPES

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = sorted((ROOT / "docs" / "kubernetes").glob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
OPERATOR = ROOT / "operator" / "minisgl_operator"
CHART = ROOT / "helm" / "minisglang"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


class Block(NamedTuple):
    """A block of code; `kind` is what stands behind its fence, empty for an indented one."""

    kind: str
    text: str


def split(text: str) -> tuple[str, list[Block]]:
    """A page without its blocks of code, and these."""
    prose: list[str] = []
    blocks: list[Block] = []
    inside: list[str] | None = None
    kind, fenced = "", False
    for line in [*text.splitlines(), ""]:
        if inside is not None and not fenced and line and not line.startswith("    "):
            blocks.append(Block("", "\n".join(inside)))
            inside = None
        if line.startswith("```"):
            if fenced:
                blocks.append(Block(kind, "\n".join(inside or [])))
                inside, fenced, kind = None, False, ""
            else:
                inside, fenced, kind = [], True, line[3:].strip()
        elif inside is not None:
            inside.append(line if fenced else line[4:])
        elif line.startswith("    ") and not (prose and prose[-1].strip()):
            inside = [line[4:]]
        else:
            prose.append(line)
    if inside is not None:
        blocks.append(Block(kind, "\n".join(inside)))
    return "\n".join(prose), blocks


def spans(page: Path) -> list[str]:
    """What stands in backquotes in the text of a page."""
    prose, _ = split(page.read_text())
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", prose)]


# --- links ---------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose, _ = split(page.read_text())
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.*)$", prose, re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        count = 0
        while (name if not count else f"{name}-{count}") in found:
            count += 1
        found.add(name if not count else f"{name}-{count}")
    return found


@each_page
def test_every_link_and_anchor_leads_somewhere(page: Path) -> None:
    prose, _ = split(page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors(file), f"{target}: no such heading"


# --- commands ------------------------------------------------------------------------------------


def commands(page: Path) -> Iterator[list[str]]:
    """Each command of the blocks of a page, as words."""
    _, blocks = split(page.read_text())
    for block in blocks:
        if block.kind not in ("", "sh", "bash"):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # goes on in the next line
                words = line.split()
            command: list[str] = []
            for word in [*words, ";"]:
                if word in ("|", "&&", "||", ";", "&"):
                    if command:
                        yield command
                    command = []
                elif command or not re.match(r"[A-Z_]+=", word):
                    command.append(word)


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def parser_of(words: list[str], known: Commands = COMMANDS) -> tuple[Parser, list[str]]:
    """The parser of a `minisgl` command, and its arguments."""
    name = words[1] if len(words) > 1 else ""
    assert name in known, f"{' '.join(words)}: there is no command {name!r}"
    _, entry = known[name]
    if isinstance(entry, dict):
        return parser_of(words[1:], entry)
    parser = Parser(prog=f"minisgl {name}")
    entry(parser)
    return parser, words[2:]


def flags(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--\w", word)]


@each_page
def test_every_command_is_one_that_its_program_takes(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in commands(page):
        if words[0] == "minisgl" and "--help" not in words:
            parser, arguments = parser_of(words)
            try:
                parser.parse_args(arguments)
            except UsageError as error:
                pytest.fail(f"{' '.join(words)}: {error}")
        elif words[0] == "minisgl-operator":
            with pytest.raises(SystemExit):
                operator_main([words[1], "--help"])
            known = capsys.readouterr().out
            for flag in flags(words):
                assert f"{flag} " in known, f"{' '.join(words)}: no flag {flag}"


@each_page
def test_every_command_in_a_sentence_has_its_flags(page: Path) -> None:
    for span in spans(page):
        words = span.split()
        # Not a list such as `minisgl engine|gateway`, nor `minisgl bench`, which needs a word more.
        if span.startswith("minisgl ") and words[1:] != ["bench"] and words[1].isalpha():
            parser, arguments = parser_of(words)
            known = set(parser._option_string_actions)
            assert set(flags(arguments)) <= known, span


@each_page
def test_every_make_target_exists(page: Path) -> None:
    called = [words[1:] for words in commands(page) if words[0] == "make"]
    called += [span.split()[1:] for span in spans(page) if span.startswith("make ")]
    for words in called:
        assert {word for word in words if "=" not in word} <= targets(), words


# --- objects and values --------------------------------------------------------------------------


@cache
def crd_schema() -> dict[str, Any]:
    crd = yaml.safe_load((CHART / "templates" / "crd.yaml").read_text())
    schema: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


@cache
def values_schema() -> dict[str, Any]:
    schema: dict[str, Any] = yaml.safe_load((CHART / "values.schema.json").read_text())
    return schema


def faults(value: Any, schema: dict[str, Any], top: dict[str, Any], at: str) -> Iterator[str]:
    """What a strict API server, or Helm, would refuse; its rules of several fields left out."""
    if ref := schema.get("$ref"):
        schema = top["$defs"][ref.rpartition("/")[2]]
    kinds = {
        "object": dict, "array": list, "string": str, "integer": int, "boolean": bool,
    }  # fmt: skip
    kind = schema.get("type")
    if kind and (not isinstance(value, kinds[kind]) or (kind == "integer" and value is True)):
        yield f"{at}: {value!r} is no {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is none of {schema['enum']}"
    if "pattern" in schema and not re.search(schema["pattern"], str(value)):
        yield f"{at}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, int) and not (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
    ):
        yield f"{at}: {value} is out of range"
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from faults(one, schema.get("items", {}), top, f"{at}[{index}]")
    if isinstance(value, dict):
        yield from (
            f"{at}.{name} is missing" for name in schema.get("required", ()) if name not in value
        )
        fields = schema.get("properties", {})
        other = schema.get("additionalProperties", not fields)
        open_ = other is True or schema.get("x-kubernetes-preserve-unknown-fields")
        for name, one in value.items():
            if name in fields:
                yield from faults(one, fields[name], top, f"{at}.{name}")
            elif isinstance(other, dict):
                yield from faults(one, other, top, f"{at}.{name}")
            elif not open_:
                yield f"{at}.{name} is unknown"


def faults_of(document: dict[str, Any]) -> list[str]:
    """Of a MiniSGLang, of a part of one (`spec` alone), or of values of the chart."""
    schema = crd_schema()
    if set(document) == {"spec"}:
        spec = {**schema["properties"]["spec"], "required": []}
        return list(faults(document["spec"], spec, schema, "spec"))
    if "apiVersion" in document:
        ours = document["apiVersion"].startswith("minisglang.io/")
        return list(faults(document, schema, schema, document["kind"])) if ours else []
    return list(faults(document, values_schema(), values_schema(), "values"))


@each_page
def test_every_object_and_every_value_is_taken(page: Path) -> None:
    _, blocks = split(page.read_text())
    for block in blocks:
        if block.kind == "yaml":
            for document in yaml.safe_load_all(block.text):
                assert not faults_of(document), block.text


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ("spec: {rank: {}}", "spec.rank is unknown"),
        ("spec: {network: {portRange: {size: 2}}}", "out of range"),
        ("spec: {ranks: {sharedMemory: Host}}", "none of"),
        ("{apiVersion: minisglang.io/v1alpha1, kind: MiniSGLang, spec: {}}", "model is missing"),
        ("networkPolicy: {nodeCIDRs: [10.0.0.0]}", "does not match"),
        ("operator: {replica: 2}", "replica is unknown"),
    ],
)
def test_a_wrong_object_or_value_is_found(document: str, fault: str) -> None:
    (found,) = faults_of(yaml.safe_load(document))
    assert fault in found


def test_every_value_that_a_command_sets_is_one_of_the_chart() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for page in PAGES:
        for words in commands(page):
            if words[0] != "helm" or not any("helm/minisglang" in word for word in words):
                continue
            for flag, setting in itertools.pairwise(words):
                if flag == "--set":
                    assert holds(values, setting.partition("=")[0]), setting


def holds(values: Any, path: str) -> bool:
    for name in path.split("."):
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True


def has_field(schema: dict[str, Any], path: str) -> bool:
    for name in path.split("."):
        schema = schema.get("items", schema)
        fields = schema.get("properties", {})
        if name not in fields:
            # Within a part of a pod, or a map of free keys.
            return not fields or bool(schema.get("x-kubernetes-preserve-unknown-fields"))
        schema = fields[name]
    return True


@pytest.mark.parametrize("page", KUBERNETES, ids=lambda p: p.name)
def test_every_field_and_value_that_is_named_exists(page: Path) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = crd_schema()
    spec = schema["properties"]["spec"]
    for span in spans(page):
        path = re.split(r"[:=]", span, maxsplit=1)[0].replace("[]", "").removesuffix(".")
        if not re.fullmatch(r"[a-z]\w*(\.\w+)+", path):
            continue
        first = path.split(".")[0]
        if first in ("spec", "status"):
            assert has_field(schema, path), span
        elif first in spec["properties"] or first in values:
            assert has_field(spec, path) or holds(values, path), span


# --- metrics and reasons -------------------------------------------------------------------------


def metrics() -> set[str]:
    """Names of all samples, with and without what a kind of metric adds to them."""
    text = GatewayMetrics(list, lambda: 0, lambda: [("rank", "g0/0", 0)]).exposition()
    text += OperatorMetrics().text()
    samples = re.findall(r"^(\w+)[{ ]", text.decode(), re.MULTILINE)
    return {*samples, *re.findall(r"^# HELP (\w+) ", text.decode(), re.MULTILINE)}


@each_page
def test_every_metric_exists(page: Path) -> None:
    packages = {"minisgl_operator", "minisgl_kernels"}
    named = set(re.findall(r"\bminisgl_[a-z_]+\b", page.read_text()))
    assert named - packages <= metrics()


def test_every_metric_is_explained() -> None:
    told = "".join((ROOT / "docs" / p).read_text() for p in ("api.md", "kubernetes/operations.md"))
    names = {name for name in metrics() if not re.search(r"_(bucket|count|sum|created)$", name)}
    assert {name for name in names if not re.search(rf"\b{name}\b", told)} == set()


def words_of(*files: Path) -> set[str]:
    """Each text in the code that is one word of CamelCase: conditions, reasons, kinds."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"^[A-Z][A-Za-z]+$", node.value))
    return found


NOT_OURS = {
    "ErrImageNeverPull", "ErrImagePull", "ImageInspectError", "InvalidImageName",
    "RegistryUnavailable", "CreateContainerError", "RunContainerError", "FailedMapVolume",
    "PreemptionByScheduler", "DeletionByTaintManager", "DisruptionTarget", "PodScheduled",
    "ReplicaFailure", "Initialized", "Running", "Completed", "Memory", "Socket", "TCP",
}  # fmt: skip
"""Words of the kubelet, of the controllers and of NCCL, which are read and not shown."""


def test_every_reason_is_explained() -> None:
    deciding = [
        OPERATOR / "drift.py",
        *OPERATOR.glob("status/*.py"),
        *OPERATOR.glob("plan/[!_]*.py"),
    ]
    told = "".join(
        page.read_text() for page in KUBERNETES if page.stem in ("concepts", "troubleshooting")
    )
    missing = {word for word in words_of(*deciding) if not re.search(rf"\b{word}\b", told)}
    assert missing <= NOT_OURS, missing - NOT_OURS
    assert set(TYPES) <= words_of(*deciding)


@pytest.mark.parametrize("page", KUBERNETES, ids=lambda p: p.name)
def test_every_reason_that_is_named_exists(page: Path) -> None:
    known = words_of(*OPERATOR.rglob("*.py"))
    known |= set(re.findall(r"\b[A-Z][A-Za-z]+\b", (CHART / "templates" / "crd.yaml").read_text()))
    known |= set(re.findall(r"kind: (\w+)", "".join(p.read_text() for p in CHART.rglob("*.yaml"))))
    known |= KUBERNETES_WORDS
    named = {span for span in spans(page) if re.fullmatch(r"[A-Z][a-z]+[A-Za-z]*", span)}
    assert named <= known, named - known


KUBERNETES_WORDS = {"CrashLoopBackOff", "Gateway", "IngressClass", "MiniSGLang", "Terminating"}
"""What Kubernetes shows and the operator has no need to spell."""


# --- messages ------------------------------------------------------------------------------------

NOT_OUR_WORDS = (
    'no matches for kind "MiniSGLang"', 'unknown field "spec', 'violates PodSecurity "',
    "unbound immediate PersistentVolumeClaims", "exceeded quota", "field not declared in schema",
    "Bad file format reading the append only file",
)  # fmt: skip
"""What kubectl, the API server, the scheduler and Redis say."""


@cache
def said() -> str:
    """All texts of the code, with `...` for what is filled in, and the rules of the CRD."""
    texts = [(CHART / "templates" / "crd.yaml").read_text()]
    for folder in ("operator", "services"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [v.value if isinstance(v, ast.Constant) else "..." for v in node.values]
                    texts.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return "\n".join(texts)


def test_every_message_that_is_quoted_is_one_of_the_code() -> None:
    quoted = 0
    for span in spans(ROOT / "docs" / "kubernetes" / "troubleshooting.md"):
        if span.startswith(("kubectl ", *NOT_OUR_WORDS)):
            continue
        for part in re.split(r"\.\.\.|: ", span):
            words = part.strip(" :;,.()").split()
            if len(words) >= 3:
                assert " ".join(words) in said(), span
                quoted += 1
    assert quoted >= 20
