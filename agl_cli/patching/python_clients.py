"""Makes OpenAI clients in Python source follow the environment, and changes nothing else.

`OpenAI(base_url=X)` ignores OPENAI_BASE_URL. Each such argument becomes `os.environ.get("OPENAI_BASE_URL") or X`, and
`api_key=` likewise, so that the program behaves as before wherever the variable is not set. Clients without these
arguments read the environment by themselves and need no edit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import libcst as cst
from libcst import matchers as m
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor
from libcst.metadata import MetadataWrapper, QualifiedNameProvider

CLIENTS = frozenset({"openai.OpenAI", "openai.AsyncOpenAI", "openai.Client", "openai.AsyncClient"})
VARIABLES: Mapping[str, str] = {"base_url": "OPENAI_BASE_URL", "api_key": "OPENAI_API_KEY"}


def imports_openai(source: bytes) -> bool:
    """Whether the module imports the openai package. Raises libcst.ParserSyntaxError for a file that is not Python."""
    module = cst.parse_module(source)
    names = m.findall(module, m.Import() | m.ImportFrom())
    return any(_root(node) == "openai" for node in names)


@dataclass(frozen=True, slots=True)
class Redirected:
    """The module's bytes, and the literals that stand in it as keys."""

    source: bytes
    secrets: tuple[str, ...]


def follow_environment(source: bytes) -> Redirected:
    """The module with its OpenAI clients redirected; the same bytes when nothing needs an edit."""
    context = CodemodContext()
    wrapper = MetadataWrapper(cst.parse_module(source))
    redirect = _Redirect(context)
    module = wrapper.visit(redirect)
    if not redirect.edited:
        return Redirected(source, ())
    return Redirected(AddImportsVisitor(context).transform_module(module).bytes, tuple(redirect.secrets))


class _Redirect(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (QualifiedNameProvider,)

    def __init__(self, context: CodemodContext) -> None:
        super().__init__()
        self.edited = False
        self.secrets: list[str] = []
        self._context = context

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        names = self.get_metadata(QualifiedNameProvider, original_node.func, set())
        if not any(name.name in CLIENTS for name in names):
            return updated_node
        return updated_node.with_changes(args=[self._argument(arg) for arg in updated_node.args])

    def _argument(self, arg: cst.Arg) -> cst.Arg:
        variable = VARIABLES.get(arg.keyword.value) if arg.keyword else None
        if variable is None or _reads(arg.value, variable):
            return arg
        self.edited = True
        if variable == VARIABLES["api_key"]:
            self.secrets += _literals(arg.value)
        AddImportsVisitor.add_needed_import(self._context, "os")
        lookup = cst.parse_expression(f'os.environ.get("{variable}")')
        fallback = arg.value if m.matches(arg.value, _ATOM) else arg.value.with_changes(lpar=_OPEN, rpar=_CLOSE)
        return arg.with_changes(value=cst.BooleanOperation(lookup, cst.Or(), fallback))


_ATOM = m.SimpleString() | m.Name() | m.Attribute() | m.Call() | m.Subscript() | m.FormattedString()
_OPEN = [cst.LeftParen()]
_CLOSE = [cst.RightParen()]


def _reads(value: cst.BaseExpression, variable: str) -> bool:
    """Whether the expression names the environment variable already."""
    return variable in _literals(value)


def _literals(value: cst.BaseExpression) -> list[str]:
    nodes = m.findall(value, m.SimpleString())
    return [str(node.evaluated_value) for node in nodes if isinstance(node, cst.SimpleString)]


def _root(node: cst.CSTNode) -> str | None:
    if isinstance(node, cst.ImportFrom):
        return _first(node.module) if node.module and not node.relative else None
    if isinstance(node, cst.Import):
        return next((name for name in (_first(alias.name) for alias in node.names) if name == "openai"), None)
    return None


def _first(name: cst.BaseExpression) -> str:
    while isinstance(name, cst.Attribute):
        name = name.value
    return name.value if isinstance(name, cst.Name) else ""
