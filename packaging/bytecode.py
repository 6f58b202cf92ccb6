"""Writes the bytecode of modules, and of what they import from this environment: bytecode.py MODULE…

That of libraries has no docstrings, which take 1 MiB of the memory of training. Modules keep theirs where a
program may show them: as the text of an option's help, or of a schema.
"""

import ast
import importlib
import marshal
import sys
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from pathlib import Path
from types import ModuleType

_WITHOUT_DOCUMENTATION = ("numpy", "paho", "cryptography", "yaml", "cbor2", "onnxruntime")
_MAY_BE_MISSING = ("onnxruntime", "typer", "pydantic")
"""Boards of 32 bits have no onnxruntime, and an older typer does without pydantic."""
_UNCHECKED = (1).to_bytes(4, "little")
"""By no time, in the form of PEP 552: a package may set another."""


def write_bytecode(module: ModuleType, file: Path) -> None:
    """Of one module."""
    source = file.read_bytes()
    tree = ast.parse(source, file)
    if module.__name__.partition(".")[0] in _WITHOUT_DOCUMENTATION:
        for node in ast.walk(tree):
            match node:
                case (
                    ast.Module(body=[ast.Expr(ast.Constant(str())) as documentation, *_])
                    | ast.ClassDef(body=[ast.Expr(ast.Constant(str())) as documentation, *_])
                    | ast.FunctionDef(body=[ast.Expr(ast.Constant(str())) as documentation, *_])
                    | ast.AsyncFunctionDef(body=[ast.Expr(ast.Constant(str())) as documentation, *_])
                ):
                    # An empty one: libraries expect there to be one.
                    documentation.value = ast.copy_location(ast.Constant(""), documentation.value)
    code = compile(tree, file, "exec", dont_inherit=True)
    written = Path(cache_from_source(str(file)))
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_bytes(MAGIC_NUMBER + _UNCHECKED + source_hash(source) + marshal.dumps(code))


def main() -> None:
    """Import the modules that are named, and write the bytecode of all that are loaded then."""
    for name in sys.argv[1:]:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in _MAY_BE_MISSING:
                raise
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(sys.prefix + "/") and file.endswith(".py"):
            write_bytecode(module, Path(file))


if __name__ == "__main__":
    main()
