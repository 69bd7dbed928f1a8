"""The table of field cases names each case, and tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "kubernetes" / "field-cases.md"
NUMBERS = (
    1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 14, 16, 18, 19, 20, 21, 23, 24, 25, 26, 28, 29, 30, 31, 32,
    35, 37, 39, 40, 41, 43, 44, 46, 48, 49, 50, 51, 52, 53, 54, 56, 57, 58, 59, 61,
)  # fmt: skip
CASES = [f"H{number:02}" for number in NUMBERS]


def rows() -> list[list[str]]:
    """The cells of each row."""
    lines = re.findall(r"^\| (H\d\d \|.*) \|$", PAGE.read_text(), re.MULTILINE)
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]


@cache
def named_in(file: str) -> set[str]:
    """Names of the tests in a file; a method is `Class::test`."""
    found = set()
    for one in ast.parse((TESTS / file).read_text()).body:
        if isinstance(one, ast.FunctionDef):
            found.add(one.name)
        elif isinstance(one, ast.ClassDef):
            methods = [m.name for m in one.body if isinstance(m, ast.FunctionDef)]
            found |= {f"{one.name}::{name}" for name in methods}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


def test_every_case_has_one_row() -> None:
    assert [row[0] for row in rows()] == CASES


@pytest.mark.parametrize("case", CASES)
def test_the_tests_of_a_case_exist(case: str) -> None:
    (row,) = [row for row in rows() if row[0] == case]
    assert len(row) == 4 and all(row)
    for name in row[3].split(", "):
        file, _, test = name.strip("`").partition("::")
        assert (TESTS / file).is_file(), f"{case} names {file}"
        assert test in named_in(file), f"{case} names {name}"
