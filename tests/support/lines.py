"""A module of ours with a gate before every statement, so that a test can stop a thread at each of them.

`sys.settrace` would do the same, but changes what it watches: on Python 3.11 a traced thread into which an exception is
thrown may spin. So the module's source is compiled anew with a call of `gate` before each statement.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from types import ModuleType

Gate = Callable[[str, int], None]


class _Gates(ast.NodeTransformer):
    """Puts ``__gate__(function, line)`` before each statement of each function."""

    def __init__(self) -> None:
        self._function = ""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        outer, self._function = self._function, node.name
        self.generic_visit(node)
        self._function = outer
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if self._function and isinstance(statements, list) and not isinstance(node, ast.ClassDef | ast.Module):
                setattr(node, field, [each for statement in statements for each in self._gated(statement)])
        return node

    def _gated(self, statement: ast.stmt) -> list[ast.stmt]:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return [statement]  # a docstring
        arguments: list[ast.expr] = [ast.Constant(self._function), ast.Constant(statement.lineno)]
        gate = ast.Expr(ast.Call(ast.Name("__gate__", ast.Load()), arguments, []))
        return [ast.copy_location(gate, statement), statement]


def gated(module: ModuleType, gate: Gate) -> ModuleType:
    """Return a copy of the module that calls `gate` with the name of the function and the line of each statement."""
    tree = ast.fix_missing_locations(_Gates().visit(ast.parse(inspect.getsource(module))))
    copy = ModuleType(module.__name__)
    copy.__dict__.update(__file__=module.__file__, __package__=module.__package__, __gate__=gate)
    exec(compile(tree, str(module.__file__), "exec"), copy.__dict__)
    return copy
