from __future__ import annotations

import libcst as cst
import pytest

from agl_cli.patching.python_clients import follow_environment, imported

PLAIN = b"from openai import OpenAI\n\nclient = OpenAI()\n"


def test_a_literal_base_url_becomes_the_fallback_of_the_environment() -> None:
    source = b'from openai import OpenAI\n\nclient = OpenAI(base_url="http://x/v1", timeout=3)  # kept\n'
    assert follow_environment(source).source == (
        b"from openai import OpenAI\nimport os\n\n"
        b'client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL") or "http://x/v1", timeout=3)  # kept\n'
    )


def test_a_client_that_reads_the_environment_is_left_byte_for_byte() -> None:
    assert follow_environment(PLAIN).source == PLAIN
    explicit = b'import os, openai\nc = openai.OpenAI(base_url=os.getenv("OPENAI_BASE_URL"))\n'
    assert follow_environment(explicit).source == explicit


def test_redirecting_twice_changes_nothing_more() -> None:
    once = follow_environment(b'import openai\nc = openai.AsyncOpenAI(base_url=URL, api_key=KEY or "k")\n').source
    assert b"or URL" in once
    assert b'or (KEY or "k")' in once
    assert follow_environment(once).source == once


def test_an_alias_is_followed_and_another_class_of_the_same_name_is_not() -> None:
    assert b"OPENAI_BASE_URL" in follow_environment(b'from openai import OpenAI as O\nO(base_url="u")\n').source
    other = b'from mine import OpenAI\nOpenAI(base_url="u")\n'
    assert follow_environment(other).source == other


@pytest.mark.parametrize("ending", [b"\r\n", b"\n"])
def test_line_endings_encoding_and_missing_last_newline_survive(ending: bytes) -> None:
    lines = [b"# coding: latin-1", b"from openai import OpenAI", b"import os", b"name = '\xe9'", b'OpenAI(api_key="k")']
    edited = follow_environment(ending.join(lines)).source.split(ending)
    assert edited[:4] == lines[:4]
    assert edited[4] == b'OpenAI(api_key=os.environ.get("OPENAI_API_KEY") or "k")'


def test_keys_that_stand_in_the_code_are_named_as_secrets() -> None:
    redirected = follow_environment(b'import openai\nopenai.OpenAI(base_url="u", api_key="sk-1")\n')
    assert redirected.secrets == ("sk-1",)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (b"import openai", {"openai"}),
        (b"import os, openai.types as t", {"openai"}),
        (b"from openai.types import X", {"openai"}),
        (b"import anthropic, openai", {"anthropic", "openai"}),
        (b"from anthropic import Anthropic", {"anthropic"}),
        (b"from .openai import X", set()),
        (b"import openai_harmony", set()),
        (b"text = 'import openai'", set()),
    ],
)
def test_only_imports_of_the_packages_count(source: bytes, expected: set[str]) -> None:
    assert imported(source) == expected


@pytest.mark.parametrize("name", ["Anthropic", "AsyncAnthropic", "Client", "AsyncClient"])
def test_an_anthropic_client_follows_its_own_variables(name: str) -> None:
    source = f'import anthropic\n\nc = anthropic.{name}(base_url="u", api_key="k", max_retries=1)\n'.encode()
    redirected = follow_environment(source)
    assert redirected.source.decode() == (
        f"import anthropic\nimport os\n\nc = anthropic.{name}("
        'base_url=os.environ.get("ANTHROPIC_BASE_URL") or "u", api_key=os.environ.get("ANTHROPIC_API_KEY") or "k", '
        "max_retries=1)\n"
    )
    assert redirected.secrets == ("k",)
    assert follow_environment(redirected.source).source == redirected.source


def test_a_file_that_is_not_python_is_an_error_for_the_caller() -> None:
    with pytest.raises(cst.ParserSyntaxError):
        imported(b"def (:\n")
