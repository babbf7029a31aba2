"""How the product is built, in numbers: what `make structure` prints and docs/structure.md keeps.

Read from the source alone, nothing is imported. A number that is worse than the one kept fails a test
(`tests/unit/test_structure.py`), so whoever makes it worse says so by writing the page again:

    python -m tests.structure [--write]
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "structure.md"
NO_ROOMS = ("docs", "tests")
CODE = frozenset({".py", ".cpp", ".h", ".js", ".css", ".html", ".proto"})
NOT_OURS = ("_pb2.py", "_pb2_grpc.py")
ENVIRONMENT = "cluster/config/environment.py"
"""The module that reads the environment."""
NOT_IMPORTED = frozenset({"accelerate", "cmeel-libomp"})
"""Declared for others: transformers loads models in pieces with the first, workers are started with the second."""

LINES, COMPLEXITY, FUNCTION, FRAGMENT = 400, 15, 70, 40


@dataclass(frozen=True)
class Module:
    """A Python file of the product."""

    path: str
    """Relative to the root."""
    text: str

    @property
    def name(self) -> str:
        """Dotted; a package's own file has the name of the package."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def package(self) -> str:
        """What relative imports start from."""
        return self.name if self.path.endswith("__init__.py") else self.name.rpartition(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of the tree."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def net_lines(self) -> int:
        """Lines that hold code: no comments, no docstrings, no blank ones."""
        lines = enumerate(self.text.splitlines(), 1)
        code = {number for number, line in lines if line.strip() and not line.strip().startswith("#")}
        for node in self.nodes:
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return len(code)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All functions, nested ones and methods too."""
        return (node for node in self.nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))

    def imports(self) -> Iterator[str]:
        """Dotted names of what is imported anywhere in the file; ``from a import b`` says ``a.b``."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = self.package.split(".")[: len(self.package.split(".")) + 1 - node.level] if node.level else []
                stem = ".".join([*above, *([node.module] if node.module else [])])
                yield from (f"{stem}.{alias.name}" for alias in node.names)


@dataclass(frozen=True)
class Product:
    """All files of the product."""

    root: Path

    @cached_property
    def rooms(self) -> list[str]:
        """The folders at the top that hold Python."""
        folders = sorted(path.parent.name for path in self.root.glob("*/__init__.py"))
        return [name for name in folders if name not in NO_ROOMS]

    @cached_property
    def files(self) -> Mapping[str, str]:
        """Text by path: written by people, and run."""
        found = (path for room in self.rooms for path in sorted((self.root / room).rglob("*")) if path.suffix in CODE)
        kept = (path for path in found if not path.name.endswith(NOT_OURS) and not _hidden(path.relative_to(self.root)))
        return {path.relative_to(self.root).as_posix(): path.read_text(encoding="utf-8") for path in kept}

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """The files in Python."""
        return tuple(Module(path, text) for path, text in self.files.items() if path.endswith(".py"))

    def named(self, condition: Callable[[Module], bool]) -> list[str]:
        """Paths of modules."""
        return [module.path for module in self.modules if condition(module)]

    def sizes(self) -> dict[str, int]:
        """How many files each folder holds, but for the one with its charter."""
        sizes: dict[str, int] = defaultdict(int)
        for path in self.files:
            folder, _, name = path.rpartition("/")
            sizes[folder] += path.endswith((".py", ".js", ".cpp")) and name != "__init__.py"
        return sizes

    def long_functions(self) -> list[str]:
        """Longer than a screen, docstring included."""
        return [
            f"{module.path}:{function.name}"
            for module in self.modules
            for function in module.functions()
            if (function.end_lineno or 0) - function.lineno >= FUNCTION
        ]

    def tangled_functions(self) -> list[str]:
        """Of more decisions than fit into a head."""
        return [
            f"{module.path}:{function.name}"
            for module in self.modules
            for function in module.functions()
            if complexity(function) > COMPLEXITY
        ]

    def rings(self) -> list[str]:
        """Modules that import each other, directly or not, wherever in them the imports stand."""
        names = {module.name for module in self.modules}
        graph = {
            module.name: {
                target for name in module.imports() if (target := _within(name, names)) not in ("", module.name)
            }
            for module in self.modules
        }
        return [" - ".join(sorted(ring)) for ring in strongly_connected(graph) if len(ring) > 1]

    def doubled_classes(self) -> list[str]:
        """Names that stand for several classes, and for how many."""
        places: dict[str, set[str]] = defaultdict(set)
        for module in self.modules:
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef):
                    places[node.name].add(module.path)
        return [f"{name} ({len(paths)})" for name, paths in sorted(places.items()) if len(paths) > 1]

    def environment_reads(self) -> list[str]:
        """Where variables of the environment are read or handed on outside the module for that; not where set."""
        return [
            f"{module.path}:{line}"
            for module in self.modules
            if module.path != ENVIRONMENT
            for line in sorted(set(_environment_reads(module.nodes)))
        ]

    def imported(self) -> set[str]:
        """Top-level names of other people's packages."""
        names = {name.split(".")[0] for module in self.modules for name in module.imports()}
        return names - set(self.rooms) - sys.stdlib_module_names

    def undeclared(self) -> list[str]:
        """Packages imported that pyproject.toml does not name."""
        declared, providers = self._declared(optional=True), packages_distributions()
        return sorted(
            name
            for name in self.imported()
            if not declared & {canonicalize_name(p) for p in providers.get(name, [name])}
        )

    def unused(self) -> list[str]:
        """Distributions that pyproject.toml has everybody install and nothing imports."""
        providers = packages_distributions()
        used = {canonicalize_name(provider) for name in self.imported() for provider in providers.get(name, [name])}
        return sorted(self._declared(optional=False) - used - NOT_IMPORTED)

    def _declared(self, *, optional: bool) -> set[str]:
        project = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        groups = [project["dependencies"], *(project["optional-dependencies"].values() if optional else ())]
        return {canonicalize_name(Requirement(line).name) for group in groups for line in group}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    number: int
    wanted: int
    examples: tuple[str, ...] = ()
    """What was counted, where it can be named."""
    free: bool = False
    """May grow with the product without a test complaining."""


def measure(root: Path = ROOT) -> list[Row]:
    """The table, from the source as it is now."""
    product = Product(root)
    room, size = max(product.sizes().items(), key=lambda item: item[1])
    long_files = [path for path, text in product.files.items() if len(text.splitlines()) > LINES]
    fragments = product.named(lambda module: not module.path.endswith("__init__.py") and module.net_lines < FRAGMENT)
    readme = (root / "README.md").read_text(encoding="utf-8").splitlines()

    def counted(what: str, found: list[str], wanted: int = 0) -> Row:
        return Row(what, len(found), wanted, tuple(found))

    return [
        Row("lines of product code", sum(len(text.splitlines()) for text in product.files.values()), 42_000, free=True),
        Row("files in the largest flat room", size, 14, (room,)),
        counted(f"files over {LINES} lines", long_files),
        counted(f"functions over {FUNCTION} lines", product.long_functions()),
        counted(f"functions of a complexity over {COMPLEXITY}", product.tangled_functions()),
        counted(f"modules under {FRAGMENT} net lines", fragments, 25),
        counted("import cycles between files", product.rings()),
        counted("class names used twice", product.doubled_classes(), 10),
        counted("environment read outside configuration", product.environment_reads()),
        counted("undeclared dependencies", product.undeclared()),
        counted("unused dependencies", product.unused()),
        Row("lines of README.md", len(readme), 120),
    ]


def complexity(function: ast.AST) -> int:
    """Decisions in a function and in what is nested there, plus one: branches, loops, handlers, cases, ``and``, ``or``,
    and every ``for`` and ``if`` of a comprehension. Assertions count for nothing, they should be many.
    """
    return 1 + sum(_decisions(node) for node in ast.walk(function))


def _decisions(node: ast.AST) -> int:
    match node:
        case ast.If() | ast.IfExp() | ast.For() | ast.AsyncFor() | ast.While() | ast.ExceptHandler() | ast.match_case():
            return 1
        case ast.BoolOp(values=values):
            return len(values) - 1
        case ast.comprehension(ifs=ifs):
            return 1 + len(ifs)
        case _:
            return 0


def strongly_connected(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Tarjan's: the largest sets of nodes that all reach each other."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        path.append(node)
        for other in sorted(graph[node]):
            if other not in order:
                visit(other)
            if other in path:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == order[node]:
            start = path.index(node)
            found.append(set(path[start:]))
            del path[start:]

    for node in graph:
        if node not in order:
            visit(node)
    return found


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part in ("__pycache__", "results", "built") for part in path.parts)


def _within(name: str, modules: Iterable[str]) -> str:
    """The module that an imported name is, or is in; empty where it is somebody else's."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def _environment_reads(nodes: Iterable[ast.AST]) -> Iterator[int]:
    written: set[ast.AST] = set()
    for node in nodes:
        match node:
            case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
                written.add(value)
            case ast.Attribute(value=value, attr="setdefault" | "update" | "pop"):
                written.add(value)
            case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "getenv") if node not in written:
                yield node.lineno


def table(rows: Iterable[Row]) -> str:
    """The rows as Markdown."""
    lines = (f"| {row.what} | {row.number:,} | {row.wanted:,} |" for row in rows)
    return "\n".join(["| what | now | wanted |", "|---|---|---|", *lines])


def page(rows: Iterable[Row]) -> str:
    """docs/structure.md."""
    return (
        "# Structure in numbers\n\n"
        "Written by `make structure ARGS=--write`; `make structure` also names them. A test fails when a number is\n"
        "worse than here, but for the first.\n\n"
        f"{table(rows)}\n"
    )


def kept(text: str) -> dict[str, int]:
    """Numbers of a page by what they count."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {what: int(number.replace(",", "")) for what, number, _ in rows[1:]}


def main(arguments: list[str]) -> None:
    """Prints the table and, behind what is too many, which; or writes the page."""
    rows = measure()
    if "--write" in arguments:
        PAGE.write_text(page(rows), encoding="utf-8")
    else:
        shown = (
            f"\n{row.what}:\n  " + "\n  ".join(row.examples) for row in rows if row.number > row.wanted and row.examples
        )
        sys.stdout.write("\n".join([table(rows), *shown]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
