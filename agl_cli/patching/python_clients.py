"""Makes OpenAI and Anthropic clients in Python source follow the environment, and changes nothing else.

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

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "openai": ("OpenAI", "AsyncOpenAI", "Client", "AsyncClient"),
    "anthropic": ("Anthropic", "AsyncAnthropic", "Client", "AsyncClient"),
}
"""The packages and their client classes."""
CLIENTS = {f"{package}.{name}": package for package, names in PACKAGES.items() for name in names}
ARGUMENTS = ("base_url", "api_key")


def imported(source: bytes) -> frozenset[str]:
    """Those of PACKAGES that the module imports. Raises libcst.ParserSyntaxError for a file that is not Python."""
    nodes = m.findall(cst.parse_module(source), m.Import() | m.ImportFrom())
    return frozenset(root for node in nodes for root in _roots(node) if root in PACKAGES)


@dataclass(frozen=True, slots=True)
class Redirected:
    """The module's bytes, and the literals that stand in it as keys."""

    source: bytes
    secrets: tuple[str, ...]


def follow_environment(source: bytes) -> Redirected:
    """The module with its clients redirected; the same bytes when nothing needs an edit."""
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
        package = next((CLIENTS[name.name] for name in names if name.name in CLIENTS), None)
        if package is None:
            return updated_node
        return updated_node.with_changes(args=[self._argument(arg, package) for arg in updated_node.args])

    def _argument(self, arg: cst.Arg, package: str) -> cst.Arg:
        name = arg.keyword.value if arg.keyword else ""
        variable = f"{package}_{name}".upper()
        if name not in ARGUMENTS or _reads(arg.value, variable):
            return arg
        self.edited = True
        if name == "api_key":
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


def _roots(node: cst.CSTNode) -> list[str]:
    if isinstance(node, cst.ImportFrom):
        return [_first(node.module)] if node.module and not node.relative else []
    return [_first(alias.name) for alias in node.names] if isinstance(node, cst.Import) else []


def _first(name: cst.BaseExpression) -> str:
    while isinstance(name, cst.Attribute):
        name = name.value
    return name.value if isinstance(name, cst.Name) else ""
